"""What an evaluation measures of several completions of a problem."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.config_files import load_config
from qerl_jax.errors import UserError
from qerl_jax.evaluation import _right_or_wrong, evaluate, evaluation_plan, pass_at_k
from qerl_jax.models.init import init_adapter
from qerl_jax.rewards.combine import RewardFunctions
from qerl_jax.rl.assembly import configured_policy, evaluation_data, held_out, sampling_engine, sampling_settings

SMALL = ["optimizer.per_device_train_batch_size=8", "optimizer.gradient_accumulation_steps=2"]


def test_pass_at_k_by_hand():
    """Of 4 completions 1, 0, 4 and 2 are right: two of them are all wrong in 3, 6, 0 and 1 of 6 cases."""
    scores = np.array([[0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1]], np.float32)
    found = pass_at_k(scores)
    assert found == {"pass@2": pytest.approx((3 + 0 + 6 + 5) / 24), "pass@4": pytest.approx(3 / 4)}
    with_gap = np.concatenate([scores, np.array([[1, 1, 1, np.nan], [np.nan] * 4], np.float32)])
    assert pass_at_k(with_gap) == found
    assert pass_at_k(with_gap[-1:]) == {}


def test_pass_at_k_is_the_mean_over_all_choices_of_k():
    scores = np.random.default_rng(0).integers(0, 2, (5, 6)).astype(np.float32)
    found = pass_at_k(scores)
    assert list(found) == ["pass@2", "pass@4", "pass@6"]
    for name, value in found.items():
        chosen = itertools.combinations(range(6), int(name.removeprefix("pass@")))
        assert value == pytest.approx(np.mean([scores[:, columns].max(1).mean() for columns in map(list, chosen)]))


@pytest.mark.parametrize(
    ("scores", "counted"), [([0.0, 1.0, np.nan], True), ([10.0, -2.0], False), ([0.5, 1.0], False)]
)
def test_pass_at_k_is_of_scores_of_right_and_wrong_alone(scores, counted):
    assert _right_or_wrong(np.asarray(scores, np.float32)) == counted


def test_several_completions_of_a_problem_begin_with_the_one_of_a_single_draw():
    seen, lengths = [], []

    class Watched(RewardFunctions):
        fails = False

        def __call__(self, examples, texts, ids, num_generations):
            if self.fails and len(texts) == 6:
                raise UserError("no such unit")
            seen.append((texts, num_generations))
            lengths.append([len(row) for row in ids])
            return super().__call__(examples, texts, ids, num_generations)

    words = ["evaluation.num_problems=12", "evaluation.batch_size=8", *SMALL]
    config = load_config("quickstart", [*words, "evaluation.num_generations_eval=3"])
    policy, examples = configured_policy(config), held_out(config, evaluation_data(config, 0))
    adapter = init_adapter(jnp.zeros(2, jnp.uint32), policy.model, 4, 8)
    with Watched(config.reward) as rewards:
        several = evaluate(config, policy, adapter, rewards, examples, 0)
        single = evaluate(load_config("quickstart", words), policy, adapter, rewards, examples, 0)
        rewards.fails = True
        with pytest.raises(UserError, match=r"^the evaluation on arithmetic, rows 10 to 11 \(from 0\): no such unit$"):
            evaluate(config, policy, adapter, rewards, examples, 0)
    # No call is larger than one of training, with 16 completions: 5 problems of 3, and 16 of one.
    assert [(len(texts), count) for texts, count in seen[:6]] == [(15, 3), (15, 3), (6, 3), (12, 1), (12, 1), (12, 1)]
    texts = [text for part, _ in seen[:3] for text in part]
    (greedy, _), (alone, _), (greedy_again, _) = seen[3:6]
    assert texts[::3] == alone and greedy == greedy_again
    assert len(set(texts[1::3]) - set(alone)) > 3
    assert several["sampled"].keys() - single["sampled"].keys() == {"pass@2", "pass@3"}
    assert several["greedy"] == single["greedy"] and several["samples"] == single["samples"]
    of_modes = [several["sampled"], several["greedy"], single["sampled"]]
    expected = [np.mean(part) for part in (np.concatenate(lengths[:3]), lengths[3], lengths[4])]
    assert [found["completions/mean_length"] for found in of_modes] == expected and len(set(expected)) == 3
    sampled = several["sampled"]
    assert sampled["accuracy"] <= sampled["pass@2"] <= sampled["pass@3"] <= 1 and sampled["pass@3"] > 0


def test_the_memory_of_an_evaluation_is_of_its_own_number_of_completions_and_never_of_8_bits():
    words = [*SMALL, "generation.kv_cache_dtype=fp8_values", "generation.max_slots=4", "evaluation.batch_size=6"]
    config = load_config("quickstart", [*words, "evaluation.num_problems=5", "evaluation.num_generations_eval=3"])
    policy = configured_policy(config)
    adapter = init_adapter(jnp.zeros(2, jnp.uint32), policy.model, 4, 8)
    rollout = sampling_engine(config, policy, sampling_settings(config, policy), 4).plan(16, 2, adapter)
    plan, samples = evaluation_plan(config, policy, adapter, 5)
    assert (plan.slots, samples, plan.rows) == (6, 15, 5)  # sampled, not greedy with 5 of 5
    wide = sampling_settings(config, policy, kv_cache_dtype="auto")
    assert plan.slot_bytes == sampling_engine(config, policy, wide, 4).plan(16, 2, adapter).slot_bytes
    assert plan.slot_bytes != rollout.slot_bytes and plan.nbytes > rollout.nbytes
    with pytest.raises(UserError, match="not one completion fits in memory"):
        evaluation_plan(load_config("quickstart", [*words, "generation.kv_cache_gb=1e-6"]), policy, adapter, 5)
