"""The style sheet of the page: light and dark, wide and narrow, screen and paper."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --raised: #f6f7f9; --ink: #1d2430; --muted: #5d6775; --line: #dde1e7;
  --same: #0b7a5e; --other: #b4451f; --mark: #fff3cf;
  --series-1: #b8560b; --series-2: #1f5fc4; --series-3: #0b7a5e; --series-4: #a0327d; --series-5: #7a6100;
  --series-6: #5b4bb3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181f; --raised: #1d232c; --ink: #e4e8ee; --muted: #9aa5b4; --line: #323b47;
    --same: #3fc79f; --other: #f0895f; --mark: #3a3214;
    --series-1: #f2a05a; --series-2: #7fb0ff; --series-3: #4fcda8; --series-4: #e88cc8; --series-5: #d9bd4a;
    --series-6: #b3a5ff;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink); line-height: 1.55;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif;
}
main { max-width: 1040px; margin: 0 auto; padding: 48px 24px 72px; }
header { max-width: 800px; }
h1 { font-size: clamp(1.45rem, 1.1rem + 1.4vw, 1.875rem); line-height: 1.25; margin: 0 0 16px; font-weight: 650;
  text-wrap: balance; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 0 0 16px; font-weight: 650; }
h3 { font-size: 1rem; line-height: 1.4; margin: 0 0 8px; font-weight: 650; overflow-wrap: anywhere; }
h4 { font-size: .8125rem; line-height: 1.4; margin: 0 0 6px; font-weight: 600; color: var(--muted);
  overflow-wrap: anywhere; }
p { margin: 0 0 12px; max-width: 72ch; overflow-wrap: anywhere; }
section { margin-top: 56px; }
sub { line-height: 0; font-size: .75em; }
.title { color: var(--muted); font-weight: 600; margin-bottom: 12px; }
.introduction { font-size: 1.0625rem; color: var(--muted); margin: 0; }
.note { color: var(--muted); font-size: .8125rem; }
.findings { margin: 20px 0; padding-left: 1.2em; max-width: 72ch; }
.findings li, .advice li { margin-bottom: 6px; overflow-wrap: anywhere; }
.caveat { border-left: 3px solid var(--muted); padding: 2px 0 2px 14px; color: var(--muted); }
.advice { padding-left: 1.2em; max-width: 72ch; margin: 0; }

.scroll { overflow-x: auto; margin-bottom: 12px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; }
td, th { padding: 9px 0 9px 24px; border-bottom: 1px solid var(--line); vertical-align: baseline; }
td:first-child, th:first-child { padding-left: 0; }
thead th { color: var(--muted); font-size: .8125rem; vertical-align: bottom; }
.outcome { width: 100%; }
.outcome td, .outcome thead th:not(:first-child) { text-align: right; }
.outcome td { white-space: nowrap; }
.outcome tbody th { min-width: 10em; max-width: 20em; overflow-wrap: anywhere; }
.outcome .missing { color: var(--muted); }
.swatch { display: inline-block; width: 18px; vertical-align: middle; margin-right: 4px; }

.key { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 24px; margin: 0 0 20px; padding: 0;
  font-weight: 600; font-size: .9375rem; overflow-wrap: anywhere; }
.note + .charts, .note + .steps { margin-top: 20px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 310px), 1fr)); gap: 0 48px;
  margin-bottom: -32px; }
.charts figure { margin: 0; min-width: 0; display: grid; grid-row: span 3; grid-template-rows: subgrid; row-gap: 0; }
.charts h3 { align-self: end; }
.charts figcaption { font-size: .9375rem; color: var(--muted); margin: 6px 0 32px; max-width: 60ch; }
.chart { width: 100%; height: auto; display: block; overflow: visible; stroke-linejoin: round; }

.galleries { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 0 48px; }
.gallery { min-width: 0; padding: 20px 0 16px; border-top: 1px solid var(--line); }
.gallery figure { margin: 0; min-width: 0; }
.gallery img { display: block; width: 100%; aspect-ratio: 1; object-fit: cover; border-radius: 4px;
  background: var(--raised); }
.crisp { image-rendering: pixelated; }
.neighbours { display: grid; grid-template-columns: 76px 1fr; gap: 12px; margin-bottom: 12px; }
.neighbours h4 { margin: 0; }
.strip { display: grid; grid-template-columns: repeat(var(--columns), minmax(0, 90px)); gap: 10px; min-width: 0; }
.gallery figcaption { font-size: .6875rem; line-height: 1.4; margin-top: 5px; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }
.query figcaption { font-weight: 600; }
.same img { outline: 3px solid var(--same); outline-offset: -1px; }
.other img { outline: 3px dotted var(--other); outline-offset: -1px; }
.same .mark { color: var(--same); font-weight: 700; }
.other .mark { color: var(--other); font-weight: 700; }

.steps { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 28px 48px; }
.step { min-width: 0; }
.step p { color: var(--muted); font-size: .9375rem; }
pre { margin: 0; padding: 12px 14px; background: var(--raised); border: 1px solid var(--line); border-radius: 6px;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8125rem; line-height: 1.5;
  -webkit-user-select: all; user-select: all; }
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
summary { cursor: pointer; }
.settings { font-size: .875rem; margin-top: 12px; }
.settings td, .settings th { padding-top: 5px; padding-bottom: 5px; overflow-wrap: anywhere; }
.settings tbody th { font-weight: 400; overflow-wrap: normal; }
.settings tr.differs { background: var(--mark); }
.settings b { font-size: .75rem; margin-left: 6px; }

@media (max-width: 640px) {
  main { padding: 28px 18px 48px; }
  section { margin-top: 44px; }
  td, th { padding-left: 16px; }
  .outcome, .outcome tbody, .outcome tr { display: block; }
  .outcome thead { display: none; }
  .outcome tr { border-bottom: 1px solid var(--line); padding: 10px 0; }
  .outcome tbody th { display: block; border: 0; padding: 0 0 2px; max-width: none; }
  .outcome td { display: flex; justify-content: space-between; border: 0; padding: 2px 0; }
  .outcome td::before { content: attr(data-label); color: var(--muted); }
  .outcome td.missing { display: none; }
  .neighbours { grid-template-columns: 1fr; gap: 6px; }
  .strip { gap: 8px; }
}
@media print {
  html { font-size: 13px; }
  main { max-width: none; padding: 0; }
  section { margin-top: 28px; }
  figure, .gallery, .step, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
}
"""
