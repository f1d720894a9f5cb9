"""The judge of our predictions: its figures are the textbook's, and no row leaves it uncounted."""

from collections import Counter

import pytest
from commands import script

from meshwright.published.rows import answered, job_of

ROW = {
    "source_group": "mine", "framework": "Megatron-LM", "model_name": "GPT", "layers": "24", "hidden": "2048",
    "heads": "16", "seq_len": "2048", "gpu": "A100", "n_gpus": "8", "tp": "8", "micro_batch": "4",
    "global_batch": "64", "precision": "fp16", "activation_ckpt": "full", "flash": "no", "outcome": "ok",
    "iter_time_s": "", "tokens_per_s_per_gpu": "", "tflops_per_gpu": "", "mfu_pct": "", "peak_mem_gib": "",
    "suggested_use": "fit", "experts": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def validate():
    return script("validate")


def run(validate, **cells):
    row = ROW | cells
    return validate.Run(row=row, job=job_of(row).job, answer=answered(row))


def test_errors_are_shares_of_what_was_measured(validate):
    found = validate._error("set", [(1.1, 1.0), (0.8, 1.0), (3.0, 2.0)], [True, False, True], Counter(), None)
    assert found.mape == pytest.approx((0.1 + 0.2 + 0.5) / 3)
    assert found.median == pytest.approx(0.2)
    assert found.p90 == pytest.approx(0.5)
    assert found.bias == pytest.approx((0.1 - 0.2 + 0.5) / 3)
    assert found.inside == pytest.approx(2 / 3)


def test_a_perfect_prediction_has_no_error_and_every_row_is_counted(validate):
    seconds = answered(ROW).price.seconds
    runs = [
        run(validate, iter_time_s=repr(seconds)),
        run(validate, iter_time_s="1", suggested_use="context"),
        run(validate, gpu="abacus", iter_time_s="1"),
        run(validate),
    ]
    (found,) = validate.time_errors("mine", runs)
    assert (found.rows, found.mape, found.inside) == (1, 0, 1)
    assert found.rows + sum(found.unscored.values()) == len(runs)


def test_measured_seconds_follow_from_whatever_a_source_prints(validate):
    tokens = 64 * 2048
    assert run(validate, tokens_per_s_per_gpu=repr(tokens / 8 / 2.0)).seconds == pytest.approx(2.0)
    job = job_of(ROW).job
    flops = validate.step_flops(job.arch, 2048, 64)
    assert run(validate, tflops_per_gpu=repr(flops / 8 / 3.0 / 1e12)).seconds == pytest.approx(3.0)
    assert run(validate).seconds is None


def test_the_constant_mfu_is_right_for_the_median_run_and_wrong_by_the_others_distance(validate):
    runs = [run(validate, iter_time_s=text) for text in ("1", "2", "4")]
    assert sorted(validate.constant_mfu(runs)) == pytest.approx([0.5, 1.0, 2.0])


def test_feasibility_counts_warnings_and_failures(validate):
    fitting = {"suggested_use": "feasibility"}
    huge = fitting | {"layers": "96", "hidden": "12288", "heads": "96", "activation_ckpt": "none"}
    runs = [
        run(validate, **fitting),
        run(validate, **huge, outcome="failed"),
        run(validate, **huge),
        run(validate, **fitting, outcome="failed"),
    ]
    found = validate.feasibility(runs)
    assert (found.rows, found.failed, found.precision, found.recall) == (4, 2, 0.5, 0.5)


def test_regret_is_how_much_slower_the_choice_was(validate):
    few = run(validate, iter_time_s="3", tp="1", micro_batch="1")
    many = run(validate, iter_time_s="2", tp="8")
    slow = run(validate, iter_time_s="5", tp="2")
    group = [few, many, slow]
    assert validate._regret(group, validate._by_rule, 1) == pytest.approx(0.5)
    assert validate._regret(group, lambda each: (each.seconds,), 1) == 0
    assert validate._regret(group, lambda each: (-each.seconds,), 2) == pytest.approx(0.5)


def test_the_page_names_every_refusal(validate):
    seconds = repr(answered(ROW).price.seconds)
    found = validate.judged([run(validate, iter_time_s=seconds), run(validate, gpu="abacus")])
    text = validate.page(found)
    assert "Of 2 rows 1 are refused" in text
    assert "abacus" in text
    assert "| mine | 1 | 0.0% |" in text
