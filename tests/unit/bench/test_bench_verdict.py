from dataclasses import replace

import pytest

from kvxfer.bench.verdict import Outcome, Row, Sensitivity, complaints

MODES = ("push", "pull")


def answer(seed):
    return tuple((seed * 31 + step * 7) % 97 for step in range(16))


def row(prompt):
    return Row(
        prompt_tokens=prompt, reference=answer(prompt), answer=answer(prompt), bytes_expected=1024, bytes_moved=1024,
        descriptors=4, backends=("LIBFABRIC",), ttft=0.1, tpot=0.01,
    )  # fmt: skip


@pytest.fixture
def good():
    return Outcome(
        rows={mode: [row(prompt) for prompt in (1, 31, 300)] for mode in MODES},
        sensitivity=Sensitivity(answer(300), answer(300), answer(5), answer(300), answer(6)),
        layout_bytes=dict.fromkeys(MODES, (262144, 262144)),
    )


def change(outcome, mode="pull", **fields):
    outcome.rows[mode][1] = replace(outcome.rows[mode][1], **fields)


def one_complaint(outcome, text):
    found = complaints(outcome, MODES, 3)
    assert len(found) == 1, found
    assert text in found[0]


def test_a_run_in_which_all_holds_passes(good):
    assert complaints(good, MODES, 3) == []


@pytest.mark.parametrize("place", [0, 7, 15])
@pytest.mark.parametrize("mode", MODES)
def test_one_different_token_fails(good, mode, place):
    right = good.rows[mode][1].answer
    change(good, mode, answer=(*right[:place], right[place] + 1, *right[place + 1 :]))
    one_complaint(good, f"{mode}, prompt of 31 tokens: the answer differs from the reference from token {place} on")


@pytest.mark.parametrize("wrong", [(), answer(31)[:-1], (*answer(31), 3)])
def test_a_shorter_longer_or_empty_answer_fails(good, wrong):
    change(good, answer=wrong)
    one_complaint(good, "differs from the reference")


def test_an_empty_answer_to_an_empty_reference_fails(good):
    change(good, answer=(), reference=())
    assert complaints(good, MODES, 3)


@pytest.mark.parametrize("moved", [0, 1023, 1025, 2048])
def test_wrong_bytes_fail(good, moved):
    change(good, bytes_moved=moved)
    one_complaint(good, "and its blocks have 1,024")


@pytest.mark.parametrize("backends", [(), ("UCX",), ("LIBFABRIC", "UCX"), ("memory",)])
def test_another_backend_fails(good, backends):
    change(good, backends=backends)
    one_complaint(good, "not by LIBFABRIC")


@pytest.mark.parametrize("outcomes", [(), ("failed",), ("done", "failed"), ("open",)])
def test_a_handoff_that_did_not_end_well_fails(good, outcomes):
    change(good, outcomes=outcomes)
    one_complaint(good, "not as done")


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_prompt_or_mode_fails(good, mode):
    good.rows[mode].pop()
    one_complaint(good, f"{mode}: 2 of 3 prompts")
    del good.rows[mode]
    one_complaint(good, f"{mode}: 0 of 3 prompts")


@pytest.mark.parametrize("found", [(262144, 131072), (0, 0)])
def test_a_layout_that_is_not_the_models_fails(good, found):
    good.layout_bytes["push"] = found
    one_complaint(good, "by the model's shape")


def test_an_unmeasured_layout_fails(good):
    del good.layout_bytes["push"]
    one_complaint(good, "push: a block has 0 bytes")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("misplaced", answer(300), "a misplaced block did not change the answer"),
        ("misplaced", (), "a misplaced block did not change the answer"),
        ("early_changed", answer(300), "one changed early token did not change the answer"),
        ("early_changed", (), "one changed early token did not change the answer"),
        ("placed", answer(8), "although every block was in its place"),
        ("placed", (), "although every block was in its place"),
    ],
)
def test_an_insensitive_model_fails(good, field, value, text):
    good.sensitivity = replace(good.sensitivity, **{field: value})
    one_complaint(good, text)


def test_no_sensitivity_check_fails(good):
    good.sensitivity = None
    one_complaint(good, "not checked")


def test_a_model_that_repeats_itself_fails(good):
    for mode in MODES:
        change(good, mode, answer=(5,) * 16, reference=(5,) * 16)
    one_complaint(good, "only 1 different tokens")


def test_a_model_that_does_not_read_its_prompt_fails(good):
    for mode in MODES:
        change(good, mode, answer=answer(1), reference=answer(1))
    one_complaint(good, "the same answer to different prompts")


def test_every_wrong_thing_is_named_at_once(good):
    change(good, bytes_moved=5, backends=("UCX",), answer=answer(2))
    good.sensitivity = None
    assert len(complaints(good, MODES, 3)) == 4
