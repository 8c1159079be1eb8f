"""The grids are what they say: which cells, made of which settings."""

import contextlib
import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from co2 import recipes
from co2.cli import main
from co2.errors import UserError
from co2.experiment import flatten
from co2.study.cell import is_taken
from co2.study.command import Request, make_plan
from co2.study.grids import STUDIES, Wanted, cost_of, label_of, method_of, name_of
from co2.study.plan import add_to_plan, all_cells, merge_plans, read_plan, write_plan
from co2.study.settings import changed, changed_settings, parse_assignments


def plan_of(*studies, **changes):
    return make_plan(studies, Request(data="shapes:40:16", **changes))


def objective(plan, study):
    """(alpha, tau_con, label smoothing, symmetric) of each variant."""
    found = {}
    for variant in plan.grids[study].variants:
        experiment = plan.cell(study, variant, 0).experiment
        term = experiment.method
        found[variant.name] = (term.alpha, term.tau_consistency, term.label_smoothing, experiment.method.symmetric)
    return found


def test_claim():
    base = recipes.co2_small().method
    assert objective(plan_of("claim"), "claim") == {
        "moco": (0.0, base.tau_consistency, 0.0, False),
        name_of(recipes.co2_small()): (base.alpha, base.tau_consistency, 0.0, False),
        "moco-smoothing-0.1": (0.0, base.tau_consistency, 0.1, False),
        "moco-co2-a10-t0.04": (10.0, 0.04, 0.0, False),
        "moco-co2-a0.3-t0.05": (0.3, 0.05, 0.0, False),
        "moco-symmetric": (0.0, base.tau_consistency, 0.0, True),
        name_of(recipes.co2_small().edit(method={"symmetric": True})): (base.alpha, base.tau_consistency, 0.0, True),
    }


def test_every_variant_of_claim_differs_from_its_baseline_in_one_thing():
    plan = plan_of("claim")
    variants = {variant.name: variant for variant in plan.grids["claim"].variants}
    for variant in variants.values():
        if variant.baseline:
            ours = flatten(plan.cell("claim", variant, 0).experiment)
            theirs = flatten(plan.cell("claim", variants[variant.baseline], 0).experiment)
            differ = {name for name in ours if ours[name] != theirs[name]}
            term = {"method.alpha", "method.tau_consistency", "method.ramp_up"}
            assert differ <= term or differ == {"method.label_smoothing"}


def test_a_weight_that_rises_is_named_and_neither_moco_nor_the_papers_settings_have_one():
    own = ("method.alpha=10", "method.tau_consistency=0.04", "method.ramp_up=0.5")
    plan = plan_of("claim", set=own)
    ramps = {v.label: plan.cell("claim", v, 0).experiment.method.ramp_up for v in plan.grids["claim"].variants}
    assert ramps == {
        "MoCo": 0.0,
        "MoCo + CO2 (α=10, τ=0.04, ramp 0.5)": 0.5,
        "MoCo + label smoothing 0.1": 0.0,
        "MoCo + CO2 (α=10, τ=0.04)": 0.0,
        "MoCo + CO2 (α=0.3, τ=0.05)": 0.0,
        "MoCo, symmetric": 0.0,
        "MoCo, symmetric + CO2 (α=10, τ=0.04, ramp 0.5)": 0.5,
    }
    varied = plan_of("vary", set=(*own[:2], "method.ramp_up=0"), vary=("method.ramp_up=[0.5]",)).grids["vary"].variants
    assert [variant.name for variant in varied] == ["moco-co2-a10-t0.04", "moco-co2-a10-t0.04-r0.5"]


def test_alpha_and_tau_have_the_promised_points_and_one_baseline():
    plan = plan_of("alpha", "tau", set=("method.alpha=1", "method.tau_consistency=0.04"))
    by_alpha = objective(plan, "alpha")
    assert [values[0] for values in by_alpha.values()] == [0, 0.1, 0.3, 1, 3, 10, 30]
    assert {values[1] for values in by_alpha.values()} == {0.04}
    by_tau = objective(plan, "tau")
    assert by_tau.pop("moco")[0] == 0
    assert [values[1] for values in by_tau.values()] == [0.02, 0.04, 0.07, 0.1, 0.2, 0.4]
    assert {values[0] for values in by_tau.values()} == {1.0}
    for study in ("alpha", "tau"):
        assert {variant.baseline for variant in plan.grids[study].variants} == {"", "moco"}


def test_the_bases_own_alpha_and_tau_are_always_among_the_points():
    plan = plan_of("alpha", "tau", set=("method.alpha=2", "method.tau_consistency=0.06"), alphas=(0.0, 5.0))
    assert [variant.place for variant in plan.grids["alpha"].variants] == [0, 2, 5]
    assert 0.06 in [variant.place for variant in plan.grids["tau"].variants]


def test_both_together_are_each_alpha_with_each_tau():
    own = ("method.alpha=1", "method.tau_consistency=0.04")
    plan = plan_of("alpha-tau", "alpha", set=own, alphas=(0.0, 1.0, 3.0), taus=(0.04, 0.1))
    values = objective(plan, "alpha-tau")
    assert [value[:2] for value in values.values()] == [(0, 0.04), (1, 0.04), (3, 0.04), (1, 0.1), (3, 0.1)]
    assert {variant.baseline for variant in plan.grids["alpha-tau"].variants[1:]} == {"moco"}
    assert set(objective(plan, "alpha")) < set(values)  # cells are shared


def test_mechanisms_are_the_recipes():
    plan = plan_of("mechanisms", epochs=7)
    for variant, recipe in zip(
        plan.grids["mechanisms"].variants,
        ("moco-small", "co2-small", "simclr-small", "co2-simclr-small", "insdisc-small", "co2-insdisc-small"),
        strict=True,
    ):
        ours, theirs = flatten(plan.cell("mechanisms", variant, 0).experiment), flatten(recipes.get(recipe))
        differ = {name for name in ours if ours[name] != theirs[name]}
        assert differ <= {"recipe", "data", "epochs", "monitoring.evaluate_every"}, (variant.name, differ)
        assert ours["epochs"] == 7


def test_edits_reach_every_recipe_of_mechanisms():
    plan = plan_of("mechanisms", set=("size=48",))
    assert {cell.experiment.size for cell in plan.cells("mechanisms")} == {48}


def test_studies_of_one_folder_share_their_cells():
    plan = plan_of("claim", "alpha", "tau", "curves", "transfer", seeds=(0, 1))
    cells = all_cells(plan, list(plan.grids))
    assert len({cell.name for cell in cells}) == len(cells)
    pair = {variant.name for variant in plan.grids["curves"].variants}
    assert pair <= {variant.name for variant in plan.grids["claim"].variants}
    (shared,) = [cell for cell in cells if cell.name == "moco-s1"]
    assert list(shared.protocols) == ["knn", "linear", "svm", "detection", "segmentation"]
    assert shared.experiment.seed == 1
    assert [cell.experiment.seed for cell in cells] == sorted(cell.experiment.seed for cell in cells)


def test_vary_takes_settings_one_at_a_time_and_skips_the_bases_value():
    plan = plan_of("vary", vary=("network.groups=[2,4,8]", "method.view.crop_scale=[[0.08,1],[0.2,1]]"))
    base, *others = plan.grids["vary"].variants
    assert base.changes == {}
    assert {next(iter(other.changes)) for other in others} == {"network.groups", "method.view.crop_scale"}
    assert [other.label for other in others] == [
        "network.groups = 2",
        "network.groups = 8",
        "method.view.crop_scale = 0.2-1",
    ]
    assert plan.cell("vary", others[2], 0).experiment.method.view.crop_scale == (0.2, 1.0)
    assert all("/" not in other.name and " " not in other.name for other in others)


def test_vary_shares_its_cells_with_studies_of_the_same_setting():
    varied = ("method.alpha=[0,1]", "method.symmetric=[true]", "method.tau_consistency=[0.3]")
    plan = plan_of("vary", "claim", "alpha", vary=varied, seeds=(0,))
    base, *others = (variant.name for variant in plan.grids["vary"].variants)
    weaker = name_of(recipes.co2_small().edit(method={"alpha": 1.0}))
    assert others[:3] == ["moco", weaker, base.replace("moco", "moco-symmetric")]
    for name in others[:3]:
        cells = {cell.experiment for study in plan.grids for cell in plan.cells(study) if cell.variant == name}
        assert len(cells) == 1
    without = plan_of("vary", set=("method.alpha=0",), vary=("method.tau_consistency=[0.3]",))
    assert [variant.name for variant in without.grids["vary"].variants] == [
        "moco",
        "moco-method.tau_consistency-0.3",
    ]


def test_names_and_costs():
    moco = recipes.moco_small()
    assert name_of(moco) == method_of(moco) == "moco"
    assert method_of(recipes.co2_simclr_small()) == "co2-simclr"
    assert method_of(recipes.co2_small().edit(method={"symmetric": True})) == "co2-symmetric"
    assert method_of(recipes.moco_label_smoothing_small()) == "moco-smoothing"
    assert cost_of(moco.edit(method={"symmetric": True})) == 2 * cost_of(moco)
    assert cost_of(moco.edit(epochs=50)) == cost_of(moco) / 4
    assert cost_of(moco.edit(size=16)) == cost_of(moco) / 4
    assert cost_of(moco.edit(earlier_sizes=(16,))) == cost_of(moco) * (1 / 4 + 1) / 2


def test_measurements_during_a_run_are_few_unless_asked_for():
    assert plan_of("claim", epochs=200).base.monitoring.evaluate_every == 20
    assert plan_of("claim", epochs=3).base.monitoring.evaluate_every == 1
    assert plan_of("claim", set=("monitoring.evaluate_every=5",)).base.monitoring.evaluate_every == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": "moco-small"}, "no consistency term"),
        ({"set": ("method.alfa=1",)}, "Did you mean 'method.alpha'"),
        ({"set": ("method.alpha",)}, "is not understood"),
        ({"set": ("seed=1",)}, "Use --seeds"),
        ({"set": ("batch_size=large",)}, "batch_size cannot be large"),
        ({"seeds": (1, 1)}, "must be different"),
        ({"seeds": ()}, "at least one"),
        ({"evaluation": ("linear.epoch=3",)}, "Did you mean 'epochs'"),
        ({"evaluation": ("lineal.epochs=3",)}, "Did you mean 'linear'"),
        ({"evaluation": ("label-free.views=2",)}, "There are knn, linear, svm, detection, segmentation"),
        ({"also": ("linear-papr",)}, "knows no 'linear-papr'. Did you mean 'linear-paper'"),
        ({"also": ("linear-paper",), "protocol": "paper"}, "linear is the paper's already"),
        ({"evaluation": ("semi-supervised.epochs=3",)}, "Ask for it with --also semi-supervised"),
        ({"evaluation": ("semi_supervised.epochs=3",)}, "Ask for it with --also semi-supervised"),
        ({"evaluation": ("knn=3",)}, "has no setting ''. It has k, temperature"),
        ({"evaluation": ("linear.epochs=few",)}, "cannot be 'few'"),
        (
            {"evaluation": ("linear.epochs=5",)},
            r"linear.epochs would do nothing with linear.solver lbfgs, .* Give linear.solver sgd too, or --protocol",
        ),
        ({"evaluation": ("knn.best_k=true", "knn.k=5")}, "knn.k would do nothing with knn.best_k"),
        ({"evaluation": ("linear.crops=0",)}, "Give linear.crops 4, or linear.plain"),
        ({"validate": True, "validate_share": 1.0}, "between 0 and 1"),
        ({"validate_share": 1.0}, "between 0 and 1"),
        ({"alphas": (1.0,)}, "--alphas is for the study alpha or alpha-tau"),
        ({"taus": (1.0,)}, "--taus is for the study tau or alpha-tau"),
        ({"vary": ("epochs=[1,2]",)}, "--vary is for the study vary"),
    ],
)
def test_mistakes(changes, message):
    with pytest.raises(UserError, match=message):
        plan_of("claim", **changes)


def test_more_mistakes():
    with pytest.raises(UserError, match="transfer is judged on VOC"):
        plan_of("transfer", also=("semi-supervised",))
    with pytest.raises(UserError, match="something to vary"):
        plan_of("vary")
    with pytest.raises(UserError, match="several values"):
        plan_of("vary", vary=("network.groups=4",))
    with pytest.raises(UserError, match="groups cannot be four"):
        plan_of("vary", vary=("network.groups=[2,four]",))
    with pytest.raises(UserError, match="is a list itself"):
        plan_of("vary", vary=("method.view.crop_scale=[0.08,1]",))
    own = recipes.co2_small().network.groups
    with pytest.raises(UserError, match=r"every value of network.groups is the base's own\. Give others"):
        plan_of("vary", vary=(f"network.groups=[{own}]",))
    with pytest.raises(UserError, match="belong together"):
        plan_of("mechanisms", base="demo-co2")


def test_values_as_people_write_them():
    texts = [
        "a=0.3",
        "b=true",
        "c=True",
        "d=[0.08, 1]",
        "e=0.08,1",
        "f=torchvision/resnet34",
        "crop-scale=1,2",
        "g=null",
        "h=[step,cosine]",
        "i=[step]",
        "j=[True, x]",
        "k=[[0.08,1],[0.2,1]]",
    ]
    assert parse_assignments(texts, "--set") == {
        "a": 0.3,
        "b": True,
        "c": True,
        "d": [0.08, 1],
        "e": [0.08, 1],
        "f": "torchvision/resnet34",
        "crop_scale": [1, 2],
        "g": None,
        "h": ["step", "cosine"],
        "i": ["step"],
        "j": [True, "x"],
        "k": [[0.08, 1], [0.2, 1]],
    }
    edited = changed(
        recipes.co2_small(), {"method.view.crop_scale": [0.08, 1], "method.head": "mlp", "method.hidden": 64}
    )
    assert (edited.method.view.crop_scale, edited.method.hidden) == ((0.08, 1), 64)


def test_settings_of_evaluations_keep_their_kind():
    from co2.evaluation.specification import LINEAR_QUICK

    edited = changed_settings(LINEAR_QUICK, {"strengths": 0.1, "weight_decay": 1, "milestones": [3]}, "linear")
    assert (edited.strengths, edited.weight_decay, edited.milestones) == ((0.1,), 1.0, (3,))


@pytest.mark.parametrize(
    "edits",
    [
        ("linear.crops=0", "linear.plain=true"),
        ("linear.epochs=5", "linear.solver=sgd", "linear.milestones=3"),
        ("detection.longest=40", "detection.train_sizes=32", "detection.test_size=32"),
    ],
)
def test_settings_of_evaluations_that_need_each_other_may_come_in_any_order(edits):
    plans = [plan_of("claim", "transfer", evaluation=given) for given in (edits, edits[::-1])]
    for study in ("claim", "transfer"):
        assert plans[0].grids[study].protocols == plans[1].grids[study].protocols


def test_judges_besides_have_the_settings_of_their_preset():
    plan = plan_of("claim", "transfer", also=("linear-paper", "semi-supervised"), evaluation=("linear-paper.epochs=7",))
    judged = plan.grids["claim"].protocols
    assert list(judged) == ["knn", "linear", "linear-paper", "semi-supervised"]
    assert (judged["linear"]["solver"], judged["linear-paper"]["solver"]) == ("lbfgs", "sgd")
    assert (judged["linear-paper"]["learning_rate"], judged["linear-paper"]["epochs"]) == (15.0, 7)
    assert judged["semi-supervised"]["epochs"] == 40  # quick, as everything else
    assert list(plan.grids["transfer"].protocols) == ["svm", "detection", "segmentation"]
    assert "--also linear-paper semi-supervised" in plan.grids["claim"].command


@pytest.mark.parametrize(("base", "weight_decay"), [("co2-v1", 5e-4), ("co2-v2", 1e-4)])
def test_the_paper_fine_tunes_backbones_of_moco_v1_with_a_weight_decay_of_their_own(base, weight_decay):
    plan = plan_of("claim", base=base, protocol="paper", also=("semi-supervised",))
    assert plan.grids["claim"].protocols["semi-supervised"]["weight_decay"] == weight_decay


def test_a_plan_survives_its_file(tmp_path):
    asked = {"seeds": (3, 4), "epochs": 5, "validate": True, "validate_share": 0.2, "view_size": 64}
    plan = plan_of("claim", "transfer", also=("linear-paper",), set=("method.view.crop_scale=0.1,1",), **asked)
    write_plan(tmp_path, plan)
    read = read_plan(tmp_path)
    assert (read.base, read.validate, read.view_size) == (plan.base, 0.2, 64)
    assert json.dumps(asdict(read), indent=1) == json.dumps(asdict(plan), indent=1)  # which has no tuples
    for study in ("claim", "transfer"):
        assert [cell.experiment for cell in read.cells(study)] == [cell.experiment for cell in plan.cells(study)]
        assert read.grids[study].variants == plan.grids[study].variants


def test_another_sitting_adds_to_a_grid_and_takes_nothing_away(tmp_path):
    own = {"set": ("method.alpha=1", "method.tau_consistency=0.04")}
    first = plan_of("alpha", "claim", seeds=(0, 1), alphas=(0.1, 0.3), also=("linear-paper",), **own)
    second = plan_of("alpha", seeds=(2,), alphas=(0.2, 3.0), jobs=3, time_limit=5.0, only=("moco",), **own)
    merged = merge_plans(first, second, tmp_path, redo=False)
    assert [variant.place for variant in merged.grids["alpha"].variants] == [0, 0.1, 0.2, 0.3, 1, 3]
    assert merged.grids["alpha"].seeds == (0, 1, 2)
    assert merged.grids["claim"] == first.grids["claim"]
    judges = first.grids["alpha"].protocols
    assert list(judges) == ["knn", "linear", "linear-paper"]
    assert merged.grids["alpha"].protocols == judges
    assert merge_plans(second, first, tmp_path, redo=False).grids["alpha"].protocols == judges
    base = "--data shapes:40:16"
    settings = "--set method.alpha=1 --set method.tau_consistency=0.04"
    assert merged.grids["alpha"].command.splitlines() == [  # without what changes no number
        f"co2 study alpha claim {base} --seeds 0 1 {settings} --alphas 0.1 0.3 --also linear-paper",
        f"co2 study alpha {base} --seeds 2 {settings} --alphas 0.2 3.0",
    ]
    assert merge_plans(merged, second, tmp_path, redo=False) == merged


def test_a_folder_has_one_base(tmp_path):
    earlier, other = plan_of("claim", epochs=5), plan_of("alpha", epochs=6)
    with pytest.raises(UserError, match=r"epochs: 5 in .*, 6 asked for"):
        merge_plans(earlier, other, tmp_path, redo=False)
    assert merge_plans(earlier, other, tmp_path, redo=True).base.epochs == 6
    with pytest.raises(UserError, match="validate: None"):
        merge_plans(earlier, plan_of("claim", epochs=5, validate=True), tmp_path, redo=False)
    same = merge_plans(earlier, plan_of("alpha", epochs=5), tmp_path, redo=False)
    assert list(same.grids) == ["claim", "alpha"]


def test_another_base_does_not_change_what_variants_are_called_by(tmp_path):
    first = plan_of("alpha", "claim", epochs=5, set=("method.alpha=1", "method.tau_consistency=0.04"))
    other = plan_of("claim", epochs=6, set=("method.alpha=2", "method.tau_consistency=0.1"))
    merged = merge_plans(first, other, tmp_path, redo=True)
    assert list(merged.grids) == ["alpha", "claim"]
    assert {cell.experiment.epochs for cell in merged.cells("alpha")} == {6}
    for study in merged.grids:
        for variant in merged.grids[study].variants:
            experiment = merged.cell(study, variant, 0).experiment
            assert (name_of(experiment), label_of(experiment)) == (variant.name, variant.label)
    assert merged.grids["claim"] == other.grids["claim"]


@pytest.mark.parametrize("base", ["co2-simclr-small", "co2-insdisc-small"])
def test_nothing_is_called_by_another_source_of_negatives_than_it_has(tmp_path, base):
    first = plan_of("claim", "curves", "mechanisms")
    second = merge_plans(first, plan_of("alpha", base=base), tmp_path, redo=True)
    third = merge_plans(second, plan_of("curves", base=base), tmp_path, redo=False)
    assert list(third.grids) == ["alpha", "curves"]
    back = merge_plans(third, plan_of("curves"), tmp_path, redo=True)
    assert list(back.grids) == ["curves"]
    for plan in (second, third, back):
        for study in plan.grids:
            for variant in plan.grids[study].variants:
                experiment = plan.cell(study, variant, 0).experiment
                assert (name_of(experiment), label_of(experiment)) == (variant.name, variant.label)


SITTING = """
import pathlib, sys, time
from co2.study.command import Request, make_plan
from co2.study.plan import add_to_plan
rounds, mine, *all_of_them = int(sys.argv[1]), *sys.argv[2:]
plan = make_plan([mine], Request(data="shapes:40:16"))
for number in range(rounds):
    pathlib.Path(f"{number}-{mine}").touch()
    end = time.monotonic() + 60
    while not all(pathlib.Path(f"{number}-{one}").exists() for one in all_of_them):
        if time.monotonic() > end:
            sys.exit("the others have not come")
    add_to_plan(pathlib.Path(f"results-{number}"), plan, redo=False)
"""


def test_of_sittings_that_begin_together_each_finds_its_study_in_the_plan(tmp_path):
    rounds, studies = 20, ("claim", "alpha", "tau")  # a third may make the lock anew that a second waits for
    words = [[sys.executable, "-c", SITTING, str(rounds), study, *studies] for study in studies]
    processes = [subprocess.Popen(one, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for one in words]
    assert [process.communicate(timeout=300)[1] for process in processes] == ["", "", ""]
    for number in range(rounds):
        folder = tmp_path / f"results-{number}"
        assert set(read_plan(folder).grids) == set(studies)
        assert [path.name for path in folder.iterdir()] == ["study.json"]  # no lock is left where results are kept


@pytest.mark.parametrize("name", ["study.json.lock", "study.json", "study.json.writing"])
def test_a_link_in_a_folder_of_results_carries_no_plan_elsewhere(tmp_path, name):
    (tmp_path / "precious").write_text("precious")
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "precious")
    with contextlib.suppress(UserError):
        add_to_plan(folder, plan_of("claim"), redo=False)
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_link_as_the_lock_of_a_cell_is_left_as_it_is(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "co2-s0.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="nothing is written through it"):
        is_taken(tmp_path / "runs" / "co2-s0")
    assert (tmp_path / "precious").read_text() == "precious"


def test_transfer_may_choose_its_view_size_after_other_studies(tmp_path):
    first = plan_of("claim")
    second = merge_plans(first, plan_of("transfer", view_size=64), tmp_path, redo=False)
    assert second.view_size == 64
    third = merge_plans(second, plan_of("claim", seeds=(7,)), tmp_path, redo=False)
    assert third.view_size == 64
    with pytest.raises(UserError, match="view_size: 64"):
        merge_plans(third, plan_of("transfer", view_size=96), tmp_path, redo=False)


def test_list_and_help_are_answered_without_torch():
    code = (
        "import sys\nfrom co2.cli import main\n"
        "main(['study']); main(['study', 'list', '--minutes-per-run', '3'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'heavy imports'"
    )
    text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert all(name in text for name in STUDIES)
    assert "7 variants x 3 seeds, 27 runs' time, about 1.4 hours" in text


def test_a_run_takes_some_time(capsys):
    assert main(["study", "list", "--minutes-per-run", "-4"]) == 2
    assert "must be above 0" in capsys.readouterr().err


def test_every_study_can_be_declared_on_the_default_base():
    wanted = Wanted(recipes.co2_small(), vary={"network.groups": [2]})
    for study in STUDIES.values():
        names = [variant.name for variant in study.variants(wanted)]
        assert len(names) == len(set(names)) > 1
