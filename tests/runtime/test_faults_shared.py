"""Several models, threads and processes around one runtime: right to the bit, or refused with one clear error."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.predictors import ExpertcastError, predictor_class
from expertcast.runtime import offload
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.faults import INPUTS, Result, slow_link, still_right


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("qwen3_moe")


@pytest.fixture
def expected(model: PreTrainedModel) -> Result:
    return greedy(model, INPUTS)


# several models, threads, processes --------------------------------------------------------------------------------


def test_two_models_at_once() -> None:
    models = [tiny_model("qwen3_moe"), tiny_model("qwen3_moe", seed=7), tiny_model("gpt_oss")]
    expected = [greedy(model, INPUTS) for model in models]
    assert not torch.equal(expected[0][0], expected[1][0])
    with (
        offload(models[0], slots=4, predictor="next_norm", link=slow_link()) as first,
        offload(models[1], slots=4, predictor="next_norm", link=slow_link(), cache=False) as second,
        offload(models[2], slots=4) as third,
    ):
        for _ in range(2):
            for offloaded, own in zip((first, second, third), expected, strict=True):
                assert_same(greedy(offloaded, INPUTS, 8), own)
        caches = [None, None]
        for token in expected[0][0][0]:  # step by step in turns
            for index, offloaded in enumerate((first, second)):
                output = offloaded(input_ids=token.view(1, 1), past_key_values=caches[index], use_cache=True)
                caches[index] = output.past_key_values
        with pytest.raises(ExpertcastError, match="offloaded already: close the other offload first"):
            offload(models[0], slots=4)
        first.close()
        assert_same(greedy(second, INPUTS), expected[1])
    for model, own in zip(models, expected, strict=True):
        assert_same(greedy(model, INPUTS), own)


def test_what_two_offloads_may_not_share(model: PreTrainedModel, expected: Result) -> None:
    other = tiny_model("qwen3_moe", seed=7)
    link = slow_link()
    predictor = predictor_class("next_norm")(*_predictor_arguments(model))
    with offload(model, slots=5, link=link, predictor=predictor) as offloaded:
        for shared in ({"link": link}, {"predictor": predictor}, {"store": offloaded.store}):
            with pytest.raises(ExpertcastError, match="serves another offload: close that one first"):
                offload(other, slots=5, **shared)
        assert_same(greedy(offloaded, INPUTS), expected)
    with offload(other, slots=5, link=link, predictor=predictor):
        pass


def _predictor_arguments(model: PreTrainedModel) -> tuple[Any, Any]:
    from expertcast.data.moe_layers import find_moe_layers

    cls = predictor_class("next_norm")
    return cls.config_class(), find_moe_layers(model).shape


def test_two_models_with_one_config(expected: Result) -> None:
    """transformers keeps the experts implementation in the config: offloading one would switch the other."""
    model = tiny_model("qwen3_moe")
    twin = type(model)(model.config).to(torch.bfloat16).eval()
    own = greedy(twin, INPUTS)
    with offload(model, slots=5) as offloaded:
        with pytest.raises(ExpertcastError, match="config"):
            twin(**INPUTS)
        with pytest.raises(ExpertcastError, match="give each model a config of its own"):
            offload(twin, slots=5)
        assert_same(greedy(offloaded, INPUTS), expected)
    assert_same(greedy(twin, INPUTS), own)


def test_two_threads(model: PreTrainedModel, expected: Result) -> None:
    """A forward beside a running one is refused; after it, any thread may run."""
    with still_right(model, expected) as offloaded:
        inside, go_on = threading.Event(), threading.Event()

        def hold(*_args: Any) -> None:
            inside.set()
            assert go_on.wait(20)

        handle = offloaded.view[2].experts.act_fn.register_forward_hook(hold)  # type: ignore[operator, union-attr]
        results: list[Result] = []
        thread = threading.Thread(target=lambda: results.append(greedy(offloaded, INPUTS)))
        thread.start()
        assert inside.wait(20)
        with pytest.raises(ExpertcastError, match="another thread is running this offloaded model"):
            offloaded(**INPUTS)
        with pytest.raises(ExpertcastError, match="a forward of this model is running"):
            offloaded.close()
        go_on.set()
        thread.join()
        handle.remove()
        assert_same(results[0], expected)


def test_many_threads(model: PreTrainedModel, expected: Result) -> None:
    """Each generation is right or refused."""
    right, refused, wrong = [], [], []

    def work() -> None:
        for _ in range(6):
            try:
                assert_same(greedy(offloaded, INPUTS), expected)
                right.append(1)
            except ExpertcastError:
                refused.append(1)
            except BaseException as error:
                wrong.append(error)

    with still_right(model, expected) as offloaded:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(right) + len(refused) == 18


def test_a_forward_inside_a_forward(model: PreTrainedModel, expected: Result) -> None:
    with still_right(model, expected) as offloaded:
        handle = offloaded.view[1].experts.act_fn.register_forward_hook(lambda *_args: model(**INPUTS) and None)  # type: ignore[operator, union-attr]
        with pytest.raises(ExpertcastError, match="inside another one"):
            greedy(offloaded, INPUTS)
        handle.remove()


def test_experts_of_another_layer_called_from_a_hook(model: PreTrainedModel, expected: Result) -> None:
    """The same ids at another layer are other experts."""
    outputs: list[Tensor] = []

    def ask_layer_three(_module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        outputs.append(layers[3].mlp.experts(args[0].reshape(-1, 32), output[2], output[1]))

    layers: Any = model.model.layers
    handle = layers[1].mlp.gate.register_forward_hook(ask_layer_three)
    greedy(model, INPUTS)
    handle.remove()
    reference, outputs = outputs, []
    with still_right(model, expected):
        handle = layers[1].mlp.gate.register_forward_hook(ask_layer_three)
        assert_same(greedy(model, INPUTS), expected)
        handle.remove()
    assert len(outputs) == len(reference) > 1
    assert all(torch.equal(own, other) for own, other in zip(outputs, reference, strict=True))


def _in_child(run: Callable[[], Any], answer: Any) -> None:
    torch.set_num_threads(1)
    try:
        run()
        answer.put("ran")
    except ExpertcastError as error:
        answer.put(str(error))


def test_fork(model: PreTrainedModel, expected: Result) -> None:
    """The link's thread does not live on in the child: it is told so, and the parent goes on."""
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    with still_right(model, expected) as offloaded:
        child = context.Process(target=_in_child, args=(lambda: offloaded(**INPUTS), answer))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        assert "offloaded in another process" in answer.get()
