"""The engine's heads against transformers: the same ids and logprobs, before and after a swap."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from actors.engine import Completion, GenerationRequest
from actors.trajectory.head import check_head
from actors.trajectory.record import SamplingParameters
from correction.errors import InputError
from correction.versions import PolicyVersion
from tests.actors.engine_stand import SEED, STOP_ID, VOCABULARY, Learner, Stand, make_model

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore")]  # vLLM's own imports warn

MORE = VOCABULARY + 36
CONTEXT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    stand = Stand(tmp_path_factory.mktemp("heads"), make_model(tied=True), head_tokens=MORE)
    yield stand
    stand.close()


def request(
    name: str,
    head_tokens: int,
    temperature: float = 0.7,
    tokens: int = 24,
    context: Sequence[int] = CONTEXT,
) -> GenerationRequest:
    sampling = SamplingParameters(temperature, tokens, (STOP_ID,), head_tokens)
    return GenerationRequest(name, context, sampling)


@torch.no_grad()
def distributions(
    learner: Learner, completion: Completion, context: Sequence[int], temperature: float
) -> torch.Tensor:
    """float32 [m, vocabulary]: log-softmax before each sampled token, each by its own version."""
    ids = torch.tensor([[*context, *completion.action_ids.tolist()]])
    rows, at = [], len(context) - 1
    for run in completion.version_runs:
        logits = learner.models[run.version](ids).logits[0, at : at + run.length_tokens].float()
        rows.append((logits / temperature).log_softmax(-1))
        at += run.length_tokens
    return torch.cat(rows)


def worst_difference(truth: torch.Tensor, completion: Completion) -> float:
    """Largest |engine - transformers| over all head tokens; a wrong choice of them shows, too."""
    assert completion.head_ids is not None
    assert completion.head_logprobs is not None
    real = completion.head_ids >= 0
    ids = torch.from_numpy(np.where(real, completion.head_ids, 0)).long()
    there = truth.gather(1, ids).numpy()
    likeliest = truth.topk(int(real[0].sum()), dim=1).values.numpy()
    at_ids = np.abs(there - completion.head_logprobs)[real].max()
    by_rank = np.abs(likeliest - completion.head_logprobs[:, : likeliest.shape[1]]).max()
    return float(max(at_ids, by_rank))


def check_sound(completion: Completion, head_tokens: int) -> None:
    assert completion.head_ids is not None
    assert completion.head_logprobs is not None
    assert completion.head_ids.shape == (len(completion.action_ids), head_tokens)
    check_head(
        completion.head_ids,
        completion.head_logprobs,
        completion.action_ids,
        completion.behaviour_logprobs,
    )


async def generated(
    stand: Stand, head_tokens: int, temperature: float, count: int = 8
) -> list[Completion]:
    jobs = (request(f"h{n}-{head_tokens}", head_tokens, temperature) for n in range(count))
    return await asyncio.gather(*(stand.engine.generate(job) for job in jobs))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("head_tokens", [1, 8, VOCABULARY, MORE])
def test_heads_are_the_learners_log_softmax(
    stand: Stand, head_tokens: int, temperature: float
) -> None:
    completions = stand.run(generated(stand, head_tokens, temperature))
    differences = []
    for completion in completions:
        check_sound(completion, head_tokens)
        truth = distributions(stand.learner, completion, CONTEXT, temperature)
        differences.append(worst_difference(truth, completion))
        sampled = truth.gather(1, torch.from_numpy(completion.action_ids.astype(np.int64))[:, None])
        own = np.abs(sampled[:, 0].numpy() - completion.behaviour_logprobs)
        assert own.max() < 1e-4
    print(f"seed {SEED} K={head_tokens} T={temperature}: worst {max(differences):.2g}")
    assert max(differences) < 1e-4


@pytest.mark.parametrize("head_tokens", [VOCABULARY, MORE])
def test_a_head_of_the_whole_vocabulary_adds_up_to_one(stand: Stand, head_tokens: int) -> None:
    for completion in stand.run(generated(stand, head_tokens, 0.7, count=4)):
        assert completion.head_ids is not None
        assert completion.head_logprobs is not None
        mass = np.exp(completion.head_logprobs.astype(np.float64)).sum(axis=1)
        np.testing.assert_allclose(mass, 1.0, atol=1e-5)
        whole = np.sort(completion.head_ids[:, :VOCABULARY], axis=1)
        assert (whole == np.arange(VOCABULARY)).all()
        assert (completion.head_ids[:, VOCABULARY:] == -1).all()
        assert np.isneginf(completion.head_logprobs[:, VOCABULARY:]).all()


def test_requests_with_and_without_heads_share_the_engine(stand: Stand) -> None:
    """They end at different steps, so that the batch is now as wide as one head, now as another."""

    async def work() -> list[Completion]:
        sizes = [0, 8, VOCABULARY, 0, 3, 0]
        jobs = (request(f"m{n}", size, tokens=6 + 30 * (n % 3)) for n, size in enumerate(sizes * 2))
        return await asyncio.gather(*(stand.engine.generate(job) for job in jobs))

    for number, completion in enumerate(stand.run(work())):
        size = [0, 8, VOCABULARY, 0, 3, 0][number % 6]
        assert stand.learner.worst_difference(CONTEXT, completion) < 1e-4
        if size == 0:
            assert (completion.head_ids, completion.head_logprobs) == (None, None)
            continue
        check_sound(completion, size)
        truth = distributions(stand.learner, completion, CONTEXT, 0.7)
        assert worst_difference(truth, completion) < 1e-4


def test_heads_over_several_turns_with_cached_prefixes(stand: Stand) -> None:
    async def episode(name: str) -> float:
        context, worst = [*CONTEXT, 9 + len(name)], 0.0
        for turn in range(3):
            job = request(f"{name}-{turn}", 16, context=list(context))
            completion = await stand.engine.generate(job)
            check_sound(completion, 16)
            truth = distributions(stand.learner, completion, context, 0.7)
            worst = max(worst, worst_difference(truth, completion))
            context += [*completion.action_ids.tolist(), 9, 10 + turn]
        return worst

    async def work() -> list[float]:
        return await asyncio.gather(*(episode("t" * n) for n in range(1, 7)))

    assert max(stand.run(work())) < 1e-4


def test_swap_in_flight_gives_each_head_by_the_version_of_its_token(stand: Stand) -> None:
    async def work() -> list[Completion]:
        sampling = SamplingParameters(0.7, 300, (), VOCABULARY)
        jobs = [
            asyncio.create_task(
                stand.engine.generate(GenerationRequest(f"s{n}", CONTEXT, sampling))
            )
            for n in range(8)
        ]
        published = stand.learner.publish(stand.learner.train())
        await asyncio.sleep(0.3)
        await stand.engine.swap(published)
        return await asyncio.gather(*jobs)

    before = stand.learner.newest
    completions = stand.run(work())
    for completion in completions:
        versions = [run.version for run in completion.version_runs]
        assert versions == [before, PolicyVersion(0, before.step + 1)]
        check_sound(completion, VOCABULARY)
        truth = distributions(stand.learner, completion, CONTEXT, 0.7)
        assert worst_difference(truth, completion) < 1e-4


@pytest.mark.parametrize("head_tokens", [MORE + 1, -1])
def test_a_head_that_the_engine_was_not_built_for_harms_nobody_else(
    stand: Stand, head_tokens: int
) -> None:
    with pytest.raises(InputError, match=f"at most {MORE}"):
        stand.run(stand.engine.generate(request("big", head_tokens)))
    check_sound(stand.run(stand.engine.generate(request("good", 2))), 2)
