"""Tables and figures on disk, and the page that has everything."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from co2 import recipes
from co2.cli import main
from co2.errors import UserError
from co2.study.plan import merge_plans, write_plan
from co2.study.report import report_study, write_page
from co2.study.tables import rows_of

MOCO = {0: 60.0, 1: 62.0, 2: 61.0}
CO2 = {0: 63.0, 1: 64.0, 2: 65.5}


def test_what_cannot_be_written_is_told_in_a_sentence(planned, capsys):
    folder, _ = planned("claim")
    (folder / "claim.md").mkdir()
    assert main(["study", "report", str(folder)]) == 2
    assert f"{folder / 'claim.md'}: Is a directory. Make room there" in capsys.readouterr().err


def test_a_study_without_records_has_a_table_and_no_figure(planned):
    folder, plan = planned("alpha", "claim", "curves", "transfer")
    for study in plan.grids:
        results = report_study(folder, plan, study)
        assert not list(folder.glob(f"{study}.svg"))
        assert "Cells still missing" in (folder / f"{study}.md").read_text()
        assert all(row["n"] == 0 for row in rows_of(results))


def test_a_figure_of_records_that_are_gone_goes_too(planned, write_cell):
    folder, plan = planned("claim")
    write_cell(folder, plan, "claim", "moco", 0, {"linear.top1": 1.0, "knn.top1": 1.0})
    report_study(folder, plan, "claim")
    assert len(list(folder.glob("claim.[sp]*g"))) == 2
    (folder / "cells" / "moco-s0.json").unlink()
    report_study(folder, plan, "claim")
    assert not list(folder.glob("claim.[sp]*g"))


def test_without_matplotlib_the_tables_are_written_and_the_reader_told(planned, monkeypatch, capsys):
    folder, plan = planned("claim")
    monkeypatch.setitem(__import__("sys").modules, "co2.study.figures", None)
    monkeypatch.setattr("builtins.__import__", _without("matplotlib", "co2.study.figures", __import__), raising=True)
    report_study(folder, plan, "claim")
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert (folder / "claim.md").is_file()


def _without(missing, module, real):
    def load(name, *arguments, **options):
        if name == module:
            raise ImportError(f"No module named '{missing}'", name=missing)
        return real(name, *arguments, **options)

    return load


def test_the_page_has_everything_and_keeps_what_people_wrote(planned, tmp_path, monkeypatch, fill):
    monkeypatch.chdir(tmp_path)
    folder, plan = planned("claim", "alpha", seeds=(0, 1, 2))
    co2 = plan.grids["claim"].variants[1].name
    fill(folder, plan, "claim", {"moco": MOCO, co2: CO2})
    (folder / "notes.md").write_text("What the data are.\n")
    (folder / "claim.notes.md").write_text("It did not reproduce **because**.\n")
    page = tmp_path / "docs" / "RESULTS.md"
    page.parent.mkdir()
    (page.parent / "RESULTS.notes.md").write_text("In short: yes.\n")
    relative = folder.relative_to(tmp_path)
    assert write_page([relative], page.relative_to(tmp_path)) == page.relative_to(tmp_path)
    text = page.read_text()
    for part in ("In short: yes.", "What the data are.", "It did not reproduce **because**."):
        assert text.count(part) == 1, part
    assert text.count("**64.17 ± 1.26**") == 2  # in both studies: they share the cell
    assert text.index("In short") < text.index("What the data") < text.index("64.17") < text.index("did not reproduce")
    assert "```\nco2 study claim alpha --data shapes:40:16 --base demo-co2 --epochs 2 --set " in text
    for link in ("../results/claim.svg", "../results/cells", "../results/claim.csv", "../results/study.json"):
        assert f"({link})" in text
        assert (page.parent / link).exists()
    assert "alpha.svg" in text
    write_page([relative], page.relative_to(tmp_path))
    assert page.read_text() == text
    assert (folder / "notes.md").read_text() == "What the data are.\n"


def test_links_in_notes_lead_from_the_page_to_the_same_places(planned, tmp_path):
    folder, _ = planned("claim", folder=tmp_path / "a study")
    (folder / "notes.md").write_text(
        "[here](#below), [a site](https://example.org/a.md), [the root](/etc)\n\n```\n[code](cells)\n```\n\n"
        "[cells](cells), [another](../other/notes.md#top), ![a picture](a%20b.png)"
    )
    (folder / "claim.notes.md").write_text("[this page](../docs/RESULTS.md#results), [all of it](../docs/RESULTS.md)")
    page = tmp_path / "docs" / "RESULTS.md"
    page.parent.mkdir()
    (page.parent / "RESULTS.notes.md").write_text("[the cells](../a%20study/cells), [that](RESULTS.md#claim)")
    text = write_page([folder], page).read_text()
    for expected in (
        "[here](#below), [a site](https://example.org/a.md), [the root](/etc)",
        "```\n[code](cells)\n```",
        "[cells](../a%20study/cells), [another](../other/notes.md#top), ![a picture](../a%20study/a%20b.png)",
        "[this page](#results), [all of it](RESULTS.md)",
        "[the cells](../a%20study/cells), [that](#claim)",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("notes", "heading", "begins"),
    [
        ("In short: yes.", "# Results", "In short"),
        ("# How they were chosen\n\nIn short: well.", "# How they were chosen", "In short"),
        ("# How they were chosen", "# How they were chosen", "##"),
        ("## In short\n\nYes.", "# Results", "## In short"),
    ],
)
def test_notes_may_begin_with_the_heading_of_the_page(planned, tmp_path, notes, heading, begins):
    folder, _ = planned("alpha", folder=tmp_path / "results")
    (tmp_path / "page.notes.md").write_text(notes + "\n")
    _mark, first, made, then, *_ = write_page([folder], tmp_path / "page.md").read_text().split("\n\n")
    assert first == heading
    assert made.startswith("Made from the records by")
    assert then.startswith(begins)


def titles_of(text):
    """What the parts of a page are called, which its list of them comes before."""
    contents, *titles = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert contents == "The studies"
    return titles


def test_parts_of_a_page_are_called_by_what_tells_them_apart(planned, tmp_path):
    own = {"epochs": 3, "base": "demo-co2", "set": ()}
    folders = {
        name: planned("vary", folder=tmp_path / name, vary=("network.groups=[2]",), **{**own, **changes})[0]
        for name, changes in {
            "two": {"epochs": 2},
            "co2": {},
            "moco": {"set": ("method.alpha=0",)},
            "validated": {"validate": True},
            "wider": {"validate": True, "set": ("size=20",)},
            "faster": {"validate": True, "set": ("size=20", "optimisation.learning_rate=0.5")},
            "again": {"validate": True, "set": ("size=20", "optimisation.learning_rate=0.5")},
        }.items()
    }
    text = write_page(list(folders.values()), tmp_path / "page.md").read_text()
    titles = titles_of(text)
    judged = "judged on 10% of the training images"
    assert titles == [
        "shapes:40:16, 2 epochs",
        "shapes:40:16, 3 epochs, MoCo + CO2 (α=3, τ=0.4, ramp 1)",
        "shapes:40:16, 3 epochs, MoCo",
        f"shapes:40:16, 3 epochs, learning rate 0.03, 32 pixels, {judged}",
        f"shapes:40:16, 3 epochs, learning rate 0.03, 20 pixels, {judged}",
        f"shapes:40:16, 3 epochs, learning rate 0.5, {folders['faster']}, {judged}",
        f"shapes:40:16, 3 epochs, learning rate 0.5, {folders['again']}, {judged}",
    ]
    anchor = "shapes4016-3-epochs-moco--co2-α3-τ04-ramp-1"
    assert f"- [shapes:40:16, 3 epochs, MoCo + CO2 (α=3, τ=0.4, ramp 1)](#{anchor})\n" in text
    assert text.index(f"- [{titles[-1]}](#") < text.index(f"## {titles[0]}")
    assert "Base: the recipe `demo-co2` as MoCo, with" in text


def test_heads_and_instance_temperatures_tell_studies_apart(planned, tmp_path):
    folders = [
        planned("alpha", folder=tmp_path / str(number), epochs=3, base="demo-co2", set=changes)[0]
        for number, changes in enumerate(
            (
                ("method.head=linear",),
                ("method.head=mlp", "method.tau=0.1"),
                ("method.head=mlp", "method.tau=0.2"),
            )
        )
    ]
    text = write_page(folders, tmp_path / "page.md").read_text()
    titles = titles_of(text)
    assert titles == [
        "shapes:40:16, 3 epochs, linear head",
        "shapes:40:16, 3 epochs, MLP head, instance temperature 0.1",
        "shapes:40:16, 3 epochs, MLP head, instance temperature 0.2",
    ]
    assert "groups of batch statistics, a linear head, an instance temperature of" in text
    assert "groups of batch statistics, an MLP head, an instance temperature of 0.2, a learning rate" in text


def test_a_batch_tells_studies_apart_and_not_the_learning_rate_that_follows_it(planned, tmp_path):
    folders = [
        planned("alpha", folder=tmp_path / str(size), epochs=3, base="demo-co2", set=(f"batch_size={size}",))[0]
        for size in (8, 16)
    ]
    text = write_page(folders, tmp_path / "page.md").read_text()
    titles = titles_of(text)
    assert titles == ["shapes:40:16, 3 epochs, batch 8", "shapes:40:16, 3 epochs, batch 16"]


def test_a_warm_up_tells_studies_apart(planned, tmp_path):
    folders = [
        planned("alpha", folder=tmp_path / f"warm {share}", set=(f"optimisation.warm_up={share}",))[0]
        for share in (0, 0.05)
    ]
    text = write_page(folders, tmp_path / "page.md").read_text()
    titles = titles_of(text)
    assert titles == ["shapes:40:16, 2 epochs, no warm-up", "shapes:40:16, 2 epochs, warm-up 5%"]
    assert text.count("warmed up over the first 5% of the run;") == 1


def test_views_that_grow_tell_studies_apart(planned, tmp_path):
    folders = [
        planned("alpha", folder=tmp_path / name, epochs=3, set=("size=32", f"earlier_sizes={sizes}"))[0]
        for name, sizes in (("all alike", "[]"), ("growing", "[16,24]"))
    ]
    text = write_page(folders, tmp_path / "page.md").read_text()
    titles = titles_of(text)
    assert titles == ["shapes:40:16, 3 epochs, 32 pixels", "shapes:40:16, 3 epochs, 16 then 24 then 32 pixels"]
    assert text.count("views of 16 then 24 then 32 pixels, crops") == 1


def test_a_page_says_what_a_command_takes_since_its_recipe_has_changed(planned, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    own = {"base": "co2-small", "epochs": None, "set": ("size=16", "network.stem=small-stride-2")}
    vary = {"vary": ("optimisation.weight_decay=[0.1,0.2]",)}
    folder, plan = planned("vary", "claim", **own, **vary)
    assert "has changed" not in write_page([folder], page).read_text()
    today = recipes.get("co2-small").edit(
        epochs=7,
        size=64,
        method={"view": {"crop_scale": (0.5, 1.0)}},
        network={"stem": "standard"},
        optimisation={"weight_decay": 0.3, "schedule": "step"},
        monitoring={"log_every": 3},
    )
    recipe = recipes.RECIPES["co2-small"]
    monkeypatch.setitem(recipes.RECIPES, "co2-small", replace(recipe, make=lambda: today))
    text = write_page([folder], page).read_text()
    said = re.search(r"The recipe has changed since: add `(.*)` to have the same settings today\.", text)
    words = shlex.split(said[1])
    assert words == [
        *("--epochs", "200", "--set", "method.view.crop_scale=[0.08, 1.0]"),
        *("--set", "optimisation.weight_decay=0.0005", "--set", "optimisation.schedule=cosine"),
    ]
    more = (*own["set"], *(value for option, value in zip(words[::2], words[1::2], strict=True) if option == "--set"))
    again = planned("vary", "claim", folder=tmp_path / "again", **{**own, "epochs": 200, "set": more}, **vary)[1]
    same = replace(again.base, monitoring=plan.base.monitoring)
    assert same == plan.base


def test_what_one_command_of_several_leaves_to_a_recipe_that_has_changed_is_said(planned, monkeypatch, tmp_path):
    own, base = ("size=16", "network.stem=small-stride-2"), {"base": "co2-small", "epochs": None}
    folder, plan = planned("claim", set=own, **base)
    weight = f"method.alpha={recipes.get('co2-small').method.alpha}"  # as the recipe has it, and now by name
    more = planned("alpha", folder=tmp_path / "more", set=(*own, weight), **base)[1]
    write_plan(folder, merge_plans(plan, more, folder, redo=False))
    recipe, today = recipes.RECIPES["co2-small"], recipes.get("co2-small").edit(method={"alpha": 0.7})
    monkeypatch.setitem(recipes.RECIPES, "co2-small", replace(recipe, make=lambda: today))
    assert f"add `--set {weight}` to have" in write_page([folder], tmp_path / "page.md").read_text()


def test_a_page_says_where_negatives_come_from(planned, tmp_path):
    folder, _ = planned("vary", base="simclr-small", set=("size=16",), vary=("batch_size=[8]",))
    text = write_page([folder], tmp_path / "page.md").read_text()
    assert ", negatives from the batch itself, one group of batch statistics, an MLP head" in text


def test_a_page_says_that_a_recipe_is_gone(planned, monkeypatch, tmp_path):
    folder, _ = planned("claim")
    monkeypatch.delitem(recipes.RECIPES, "demo-co2")
    assert "There is no recipe `demo-co2` any more." in write_page([folder], tmp_path / "page.md").read_text()


def test_a_page_says_whose_minutes_it_counts(planned, write_cell, tmp_path):
    folder, plan = planned("curves")
    write_cell(folder, plan, "curves", "moco", 0, {"knn.top1": 1.0, "linear.top1": 2.0})
    time = {"wall": 1740.0, "steps": 1.0, "sittings": 1}
    co2 = plan.grids["curves"].variants[1].name
    page = write_page([folder], tmp_path / "page.md")
    assert "A cell took 60 seconds on average by its own clock, on cpu." in page.read_text()
    write_cell(folder, plan, "curves", co2, 0, {"knn.top1": 1.0, "linear.top1": 2.0}, seconds=time)
    assert "A cell took 15 minutes on average by its own clock (30 minutes in all, where cells that ran at once" in (
        write_page([folder], page).read_text()
    )


def test_links_of_a_page_lead_to_folders_with_any_name(planned, tmp_path):
    folder, _ = planned("claim", folder=tmp_path / "a (b) #1")
    text = write_page([folder], tmp_path / "page.md").read_text()
    assert "](a%20%28b%29%20%231/study.json)" in text


def test_a_folder_whose_name_is_no_text_is_reported_on(planned, tmp_path):
    folder, _ = planned("claim", folder=tmp_path / "not \udcff text", out=str(tmp_path / "not \udcff text"))
    text = write_page([folder], tmp_path / "page.md").read_text()
    assert f"co2 study report '{tmp_path}/not \\udcff text'" in text
    assert (folder / "claim.md").is_file()


def test_a_page_that_someone_else_wrote_is_left_alone(planned, tmp_path):
    folder, _ = planned("claim")
    page = tmp_path / "RESULTS.md"
    page.write_text("# Mine\n")
    with pytest.raises(UserError, match="left alone"):
        write_page([folder], page)
    assert page.read_text() == "# Mine\n"
    for place in (tmp_path, Path(".")):
        with pytest.raises(UserError, match=r"is a folder. Give --out the name of a page in it"):
            write_page([folder], place)
    with pytest.raises(UserError, match="holds no study"):
        write_page([tmp_path], tmp_path / "other.md")
