"""The views of published methods at any size, as their files have them."""

from dataclasses import replace

from co2.methods import moco, simclr
from co2.views.view import View


def moco_v1_views(size: int = 224) -> View:
    return replace(moco.V1, size=size)


def moco_v2_views(size: int = 224) -> View:
    return replace(moco.V2, size=size)


def simclr_views(size: int = 224) -> View:
    return replace(simclr.VIEW, size=size)


def small_views(size: int = 32) -> View:
    return replace(moco.SMALL, size=size)
