"""Text with a KV cache: the same logits as a forward over everything, alone or in a batch."""

from itertools import islice

import msgspec
import pytest
import torch
from torch import Tensor

from meshwright.models import generate
from meshwright.models.generate import Sampling, caching, chooser, columns_for, continuations, draw

CPU = torch.device("cpu")
LOGITS = torch.tensor([1.0, 3.0, -2.0])
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8]]
# Logits here are below 100; float64 rounds them by 1e-14, and sums in another order add a few roundings.
CLOSE = 1e-11


def traced(model, prompts, count, width=1, columns=None) -> tuple[list[list[int]], list[Tensor]]:
    """The greedy tokens of each step, and the logits they were chosen by."""
    seen: list[Tensor] = []
    greedy = chooser(Sampling(), CPU, len(prompts))

    def choose(logits):
        seen.append(logits)
        return greedy(logits)

    columns = columns or columns_for(model.arch, CPU, max(map(len, prompts)) + count + width, width)
    with caching([model], columns):
        words = continuations(generate.forward(model), choose, model.arch, CPU, prompts, width)
        return list(islice(words, count)), seen


@torch.no_grad()
def whole(model, tokens: list[int]) -> Tensor:
    """The logits after all tokens, by one forward without a cache."""
    return model(torch.tensor([tokens]), torch.arange(len(tokens))[None])[0, -1]


@pytest.mark.parametrize("width", [1, 3])
def test_every_token_has_the_logits_of_a_forward_over_all_before_it(dense, build, width):
    model = build(dense).eval()
    steps, seen = traced(model, PROMPTS, 8, width)
    for number, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for tokens, logits in zip(steps, seen, strict=True):
            torch.testing.assert_close(logits[number], whole(model, text), rtol=0, atol=CLOSE)
            text.append(tokens[number])


def test_so_it_is_with_experts(topk, build):
    model = build(topk).eval()
    steps, seen = traced(model, PROMPTS, 5)
    for number, prompt in enumerate(PROMPTS):
        text = prompt + [tokens[number] for tokens in steps[:-1]]
        torch.testing.assert_close(seen[-1][number], whole(model, text), rtol=0, atol=CLOSE)


def test_longrope_rotates_a_long_text_alike_from_its_first_token(llama, build):
    pairs = llama.rotated // 2
    short, long = tuple(1.0 + i for i in range(pairs)), tuple(2.0 + 3 * i for i in range(pairs))
    arch = msgspec.structs.replace(llama, rope_scaling="longrope", rope_original=9, rope_short=short, rope_long=long)
    model = build(arch).eval()
    steps, seen = traced(model, PROMPTS[:1], 5)
    text = PROMPTS[0] + [tokens[0] for tokens in steps[:-1]]
    assert len(PROMPTS[0]) < arch.rope_original < len(text)
    torch.testing.assert_close(seen[-1][0], whole(model, text), rtol=0, atol=CLOSE)


def test_a_batch_says_what_each_prompt_says_alone(arch, build):
    model = build(arch).eval()
    prompts = PROMPTS if not arch.capacity else [PROMPTS[0], PROMPTS[0][::-1]]  # padding would take experts' slots
    together, _ = traced(model, prompts, 8)
    for number, prompt in enumerate(prompts):
        alone, _ = traced(model, [prompt], 8)
        assert [tokens[number] for tokens in together] == [token for (token,) in alone]


def test_the_last_position_of_a_learned_table_can_be_used(gpt, build):
    model = build(gpt).eval()
    prompt = list(range(25))
    steps, seen = traced(model, [prompt, [1]], gpt.context - len(prompt) + 1, width=2)
    text = prompt + [tokens[0] for tokens in steps[:-1]]
    assert len(text) == gpt.context
    torch.testing.assert_close(seen[-1][0], whole(model, text), rtol=0, atol=CLOSE)


def test_columns_beyond_the_text_change_nothing(llama, build):
    model = build(llama).eval()
    assert traced(model, PROMPTS, 6)[0] == traced(model, PROMPTS, 6, columns=128)[0]


def test_a_gpu_sees_few_shapes_unless_padding_would_change_the_text(llama, topk):
    sizes = {columns_for(llama, torch.device("cuda"), tokens) for tokens in range(1, 300)}
    assert sizes == {128, 256, 384}
    limited = msgspec.structs.replace(topk, capacity=1.0)
    assert columns_for(limited, torch.device("cuda"), 9) == columns_for(llama, CPU, 9) == 9
    assert columns_for(llama, CPU, 9, width=4) == 12


def test_the_model_is_left_as_it_was(llama, build, batch):
    model = build(llama).eval()
    attends, build_mask = [block.attn.attend for block in model.blocks.values()], model.build_mask
    before = model(**batch)
    traced(model, PROMPTS, 2)
    assert [block.attn.attend for block in model.blocks.values()] == attends
    assert model.build_mask is build_mask
    assert torch.equal(model(**batch), before)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-40, 1e-38])
def test_near_temperature_zero_it_is_the_likeliest(temperature):
    assert draw(LOGITS, Sampling(temperature=temperature), torch.Generator().manual_seed(1)).tolist() == [1]


@pytest.mark.parametrize("logits", [[1.0, float("nan"), 0.0], [float("inf"), 1.0, float("inf")]])
def test_logits_that_are_not_finite_still_give_a_token(logits):
    (token,) = draw(torch.tensor(logits), Sampling(temperature=0.8), torch.Generator().manual_seed(1)).tolist()
    assert 0 <= token < 3


# Of a softmax over log-probabilities; a share of 1000 draws is off by more than 0.06 once in ten thousand times.
KINDS = {
    "by their own": (Sampling(temperature=1.0), [0.5, 0.3, 0.15, 0.05]),
    "colder": (Sampling(temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    "two likeliest": (Sampling(temperature=1.0, top_k=2), [0.625, 0.375, 0, 0]),
    "more than there are": (Sampling(temperature=1.0, top_k=9), [0.5, 0.3, 0.15, 0.05]),
    "nucleus": (Sampling(temperature=1.0, top_p=0.7), [0.625, 0.375, 0, 0]),
    "nucleus of one": (Sampling(temperature=1.0, top_p=0.01), [1, 0, 0, 0]),
    "both": (Sampling(temperature=1.0, top_k=3, top_p=0.6), [0.625, 0.375, 0, 0]),
}


@pytest.mark.parametrize(("sampling", "shares"), KINDS.values(), ids=KINDS)
def test_tokens_come_as_often_as_they_should(sampling, shares):
    logits, generator = torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), torch.Generator().manual_seed(1)
    drawn = torch.cat([draw(logits, sampling, generator) for _ in range(1000)])
    torch.testing.assert_close(
        torch.bincount(drawn, minlength=4) / 1000, torch.tensor(shares).float(), atol=0.06, rtol=0.0
    )


def test_a_prompt_draws_the_same_alone_and_beside_others():
    rows = torch.randn(3, 31, generator=torch.Generator().manual_seed(2))
    sampling = Sampling(temperature=1.5, seed=5)
    together = chooser(sampling, CPU, 3)
    alone = chooser(sampling, CPU, 1)
    assert [together(rows)[2].item() for _ in range(9)] == [alone(rows[2:]).item() for _ in range(9)]
