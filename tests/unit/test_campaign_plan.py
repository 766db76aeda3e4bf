"""The campaign's plan and its requests: drawn from a seed, the same each time; and what counts as a right answer."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.campaign.asks import IMAGES, LARGE_SIDES_PX, MODELS, SIDES_PX, Ask, Picture, Script, Tensor, WrongAnswer
from tests.campaign.faults import FAULTS
from tests.campaign.forms import check_infer, infer_body, infer_path
from tests.campaign.plan import LEAST_PERIOD_S, SCENES, draw_plan
from tests.campaign.rough import KINDS

SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS, st.sampled_from([0.1, 0.7, 2.0, 5.0, 60.0]))
def test_a_seed_draws_the_same_plan_again(seed: int, minutes: float) -> None:
    plan = draw_plan(seed, minutes, (0, 2))
    assert plan == draw_plan(seed, minutes, (0, 2))
    assert json.loads(json.dumps(plan.document()))["seed"] == seed


def test_another_seed_draws_another_plan() -> None:
    assert draw_plan(1, 5, (0, 2)).periods != draw_plan(2, 5, (0, 2)).periods


def test_what_is_done_to_one_number_of_edges_does_not_depend_on_the_others() -> None:
    alone = draw_plan(3, 2.5, (2,)).periods
    both = [one for one in draw_plan(3, 5, (0, 2)).periods if one.edges == 2]
    assert [replace(one, number=0) for one in alone] == [replace(one, number=0) for one in both]


@given(SEEDS)
def test_five_minutes_hold_every_kind_of_trouble_for_every_number_of_edges(seed: int) -> None:
    plan = draw_plan(seed, 5, (0, 2))
    for edges in plan.edges:
        kinds = [one.kind for one in plan.periods if one.edges == edges]
        assert set(kinds) == {kind for kind, scene in SCENES.items() if edges or not scene.needs_edges}
        load_s = sum(one.lasts_s for one in plan.periods if one.edges == edges)
        assert 100 < load_s < 150, "of its 150 s, starts and reckonings take the rest"


@given(SEEDS, st.sampled_from([0.1, 0.7, 5.0]))
def test_faults_lie_within_their_period_and_do_not_overlap(seed: int, minutes: float) -> None:
    for period in draw_plan(seed, minutes, (0, 2)).periods:
        assert period.lasts_s >= LEAST_PERIOD_S
        ends_s = 0.0
        for fault in period.faults:
            assert fault.at_s >= ends_s
            ends_s = fault.at_s + fault.lasts_s
            assert ends_s < period.lasts_s
        assert not period.faults or period.faults[0].at_s > 0.5, "nothing is wrong at first"


@given(SEEDS)
def test_the_server_is_started_once_for_each_setting(seed: int) -> None:
    for edges in (0, 2):
        settings = [one.setting for one in draw_plan(seed, 5, (0, 2)).periods if one.edges == edges]
        changes = sum(one != other for one, other in pairwise(settings))
        assert changes == len(set(settings)) - 1


def test_every_drawn_name_means_something() -> None:
    for seed in range(20):
        for period in draw_plan(seed, 5, (0, 2)).periods:
            assert {fault.kind for fault in period.faults} <= set(FAULTS)
            assert {client.kind for client in period.clients} <= {*KINDS, "curl"}


def right_outputs(ask: Ask, version: int = 1) -> dict[str, np.ndarray]:
    """The models' arithmetic, written down a second time."""
    x = ask.inputs[0].values
    match ask.model:
        case "simple":
            return {"OUTPUT0": x + ask.inputs[1].values, "OUTPUT1": x - ask.inputs[1].values}
        case "shift":
            return {"y": x + np.float32(100 * version)}
        case "mean":
            return {"y": x - np.mean(x, axis=0)}
    return {"y": x}


def asks(model: str) -> list[Ask]:
    script = Script(5)
    return [ask for number in range(40) if not (ask := script.ask(number, models=(model,))).is_wrong]


@pytest.mark.parametrize("model", MODELS)
def test_a_call_is_the_same_each_time_it_is_drawn(model: str) -> None:
    for number in range(20):
        first, second = (Script(9).ask(number, models=(model,)) for _ in range(2))
        assert infer_body(first) == infer_body(second)
        assert infer_path(first) == infer_path(second)


@pytest.mark.parametrize("model", MODELS)
def test_a_right_answer_passes_and_any_other_does_not(model: str) -> None:
    for ask in asks(model):
        outputs = right_outputs(ask)
        ask.check(model, "1", ask.id, outputs)
        for name, values in outputs.items():
            spoiled = np.array(values, copy=True)
            spoiled.reshape(-1)[-1] = b"?" if values.dtype == object else spoiled.reshape(-1)[-1] + 1
            missing = {one: value for one, value in outputs.items() if one != name}
            for wrong in ({**outputs, name: spoiled}, {**outputs, name: values[:-1]}, missing):
                with pytest.raises(WrongAnswer, match=name):
                    ask.check(model, "1", ask.id, wrong)
        with pytest.raises(WrongAnswer, match="asked"):
            ask.check(model, "1", "another", outputs)
        with pytest.raises(WrongAnswer, match="asked"):
            ask.check("other", "1", ask.id, outputs)


def test_an_answer_of_another_version_than_it_says_is_wrong() -> None:
    (ask, *_) = asks("shift")
    ask.check("shift", "3", ask.id, right_outputs(ask, 3))
    with pytest.raises(WrongAnswer, match="version 2"):
        ask.check("shift", "2", ask.id, right_outputs(ask, 3))


def test_an_answer_to_what_cannot_be_answered_is_wrong() -> None:
    ask = Ask("mean", (Tensor("x", "FP32", np.zeros((1, 5), np.float32)),), "id", True, is_wrong=True)
    with pytest.raises(WrongAnswer, match="cannot take"):
        ask.check("mean", "1", "id", {"y": np.zeros((1, 5), np.float32)})


def test_the_wrong_digit_is_a_wrong_answer() -> None:
    picture = Picture(IMAGES[3], "3")
    picture.check({"predictions": [{"label": "3", "score": 0.99}]})
    for best in ({"label": "8", "score": 0.99}, {"label": "3", "score": 1.5}, {"label": "3", "score": 0.1}):
        with pytest.raises(WrongAnswer):
            picture.check({"predictions": [best]})


@pytest.mark.parametrize("sides_px", [SIDES_PX, LARGE_SIDES_PX])
def test_files_are_the_same_each_time_of_every_format_and_some_are_cut_off(sides_px: tuple[int, ...]) -> None:
    files = [Script(9).file(number, sides_px) for number in range(150)]
    assert files == [Script(9).file(number, sides_px) for number in range(150)]
    sound = [Image.open(io.BytesIO(one.data)) for one in files if one.label is not None]
    assert {image.size for image in sound} == {(side_px, side_px) for side_px in sides_px}
    assert {image.format for image in sound} == {"PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"}
    assert 0 < sum(one.label is None for one in files) < 30


def answer(ask: Ask, *, binary: bool) -> tuple[dict[str, str], bytes]:
    """As the server would write it."""
    outputs, tail = [], b""
    for name, values in right_outputs(ask).items():
        tensor = Tensor(name, ask.inputs[0].dtype, values)
        own = {"name": name, "datatype": tensor.dtype, "shape": tensor.shape}
        outputs.append(
            own | ({"parameters": {"binary_data_size": len(tensor.data)}} if binary else {"data": tensor.json})
        )
        tail += tensor.data if binary else b""
    text = json.dumps({"model_name": ask.model, "model_version": "1", "id": ask.id, "outputs": outputs}).encode()
    headers = {"inference-header-content-length": str(len(text))} if binary else {}
    return headers, text + tail


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_answers_are_read_in_both_forms(model: str, binary: bool) -> None:
    for ask in asks(model):
        headers, body = answer(ask, binary=binary)
        check_infer(ask, headers, body)
        if binary:
            with pytest.raises(WrongAnswer):
                check_infer(ask, headers, body + b"x")
            with pytest.raises(WrongAnswer):
                check_infer(ask, headers, body[:-1])
