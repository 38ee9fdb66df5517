"""Who rotates queries and keys of families that transformers computes: our kernel, where that is the same."""

import pytest
import torch
from support.decoder_harness import make_runner
from support.foreign_factory import FOREIGN, foreign_folder
from support.model_factory import model_folder

from chairlift.runners.decoder.runner import DecoderRunner
from chairlift.runners.decoder.transformers_rotation import Rotation, rotated


def is_taken_over(runner: DecoderRunner) -> bool:
    modules = runner.model._attention.modules.values()  # type: ignore[union-attr]
    (found,) = {"forward" in vars(module) for module in modules}
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_halves_of_whole_heads_are_rotated_as_they_are_written(name: str, dtype: str) -> None:
    assert is_taken_over(make_runner(model_folder(name), ops="native", implementation="transformers", dtype=dtype))


@pytest.mark.parametrize(
    "name",
    [
        "phi",  # a part of each head
        "cohere",  # neighbours
        "nanochat",  # norms come after it
        "gpt2",  # nothing is rotated
        "qwen3_5_text",  # a part, by a function that turns whole heads too
    ],
)
def test_all_else_is_left_to_the_modules(name: str) -> None:
    runner = make_runner(foreign_folder(FOREIGN[name][0], name), ops="native", implementation="transformers")
    assert not is_taken_over(runner)


def test_one_table_a_pass_for_all_layers_that_turn_alike() -> None:
    rotation, angles = Rotation(), torch.rand(1, 3, 4).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    tables = []
    for _ in range(2):
        query, key = rotation.note(torch.rand(1, 2, 3, 8), torch.rand(1, 1, 3, 8), cos, sin)
        tables.append(rotation.take(query, key))
    assert tables[0] is tables[1] is not None
    assert torch.equal(tables[0], torch.cat((cos[0, :, :4], sin[0, :, :4]), dim=1))
    assert rotation.take(query, key) is None
    rotation.begin()
    query, key = rotation.note(query, key, cos, sin)
    assert rotation.take(query, key) is not tables[0]


def test_what_is_not_the_same_is_an_error() -> None:
    rotation, x = Rotation(), torch.rand(1, 1, 3, 8)
    neighbours = torch.rand(1, 3, 4).repeat_interleave(2, dim=2)
    for cos in (torch.rand(1, 3, 4), neighbours):
        rotation.note(x, x, cos, cos)
        with pytest.raises(ValueError, match="two halves of a whole head"):
            rotation.take(x, x)
    rotation.note(x, x, neighbours, neighbours)
    with pytest.raises(ValueError, match="not what is attended to"):
        rotation.take(x * 2, x)


def test_it_turns_halves() -> None:
    table = torch.tensor([[0.0, 1.0]])
    assert rotated(torch.tensor([[[[3.0, 4.0]]]]), table).tolist() == [[[[-4.0, 3.0]]]]
