"""Every sampled token is trained exactly once, in the sequence the model saw it in."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from lightning_ray.samples import build_samples, discarded, link
from lightning_ray.schema import Call, Sample
from tests.made import call


def build(*calls: Call) -> list[Sample]:
    return build_samples(calls, rollout_id="r", group_id="g")


def test_calls_that_extend_each_other_are_one_sample() -> None:
    (sample,) = build(
        call([1, 2], [3]), call([1, 2, 3, 4], [5, 6], 1), call([1, 2, 3, 4, 5, 6], [7], 2)
    )
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sample.mask.tolist() == [False, False, True, False, True, True, True]
    assert sample.logprobs.tolist() == [0, 0, -3, 0, -5, -6, -7]
    assert sample.versions.tolist() == [-1, -1, 0, -1, 1, 1, 2]
    assert sample.calls.tolist() == [-1, -1, 0, -1, 1, 1, 2]


def test_a_changed_history_opens_a_branch_and_is_not_repaired() -> None:
    first, second = build(call([1, 2], [3, 4]), call([1, 2, 3, 9], [5], 1))
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert second.token_ids.tolist() == [1, 2, 3, 9, 5]
    assert second.mask.tolist() == [False, False, False, False, True]


def test_a_side_call_does_not_break_the_main_line() -> None:
    main, side = build(call([1], [2]), call([9, 9], [8], 1), call([1, 2, 3], [4], 2))
    assert main.token_ids.tolist() == [1, 2, 3, 4]
    assert side.token_ids.tolist() == [9, 9, 8]


def test_the_same_prompt_sampled_twice_trains_both_answers() -> None:
    samples = build(call([1, 2], [3]), call([1, 2], [4], 1), call([1, 2, 4, 5], [6], 2))
    assert [s.token_ids.tolist() for s in samples] == [[1, 2, 3], [1, 2, 4, 5, 6]]


def test_calls_without_tokens_leave_no_trace() -> None:
    assert build(call([1, 2], [])) == []


def test_each_sampled_token_of_random_trees_is_trained_once_after_its_own_prompt() -> None:
    for seed in range(200):
        random.seed(seed)
        calls: list[Call] = []
        for index in range(random.randint(1, 12)):
            base: list[int] = []
            if calls and random.random() < 0.8:
                parent = random.choice(calls)
                base = [*parent.prompt_ids.tolist(), *parent.sampled_ids.tolist()]
                base = base[: random.choice([len(base), random.randint(0, len(base))])]
            prompt = base + [random.randint(0, 3) for _ in range(random.randint(1, 4))]
            sampled = [100 * index + n for n in range(random.randint(0, 3))]
            calls.append(call(prompt, sampled, index))
        trained = {}
        for sample in build(*calls):
            for position in np.flatnonzero(sample.mask):
                token = int(sample.token_ids[position])
                assert token not in trained
                trained[token] = sample.token_ids[:position].tolist()
        expected = {
            int(token): [*c.prompt_ids.tolist(), *c.sampled_ids[:n].tolist()]
            for c in calls
            for n, token in enumerate(c.sampled_ids)
        }
        assert trained == expected


def test_a_title_is_recorded_and_not_trained() -> None:
    title = replace(call([9, 9], [8]), kind="title")
    main = replace(call([1], [2], 1), kind="main")
    (sample,) = build(title, main)
    assert sample.token_ids.tolist() == [1, 2]
    both = build_samples([title, main], rollout_id="r", group_id="g", kinds=["title", "main"])
    assert len(both) == 2


def test_each_call_is_linked_to_the_one_it_shares_most_with() -> None:
    calls = [call([1, 2], [3]), call([1, 2, 3, 4], [5], 1), call([1, 2, 3, 9], [6], 2),
             call([7], [7], 3)]  # fmt: skip
    found = [(x.nearest and x.nearest.index, x.num_shared, x.continues) for x in link(calls)]
    assert found == [(None, 0, False), (0, 3, True), (0, 3, True), (None, 0, False)]
    changed = link([call([1, 2], [3, 4]), call([1, 2, 3, 9], [5], 1)])[1]
    assert (changed.num_shared, changed.continues) == (3, False)


def test_r24_an_answer_that_never_came_back_is_discarded() -> None:
    first, again = call([1, 2], [3]), call([1, 2], [4], 1)
    onward = call([1, 2, 4, 5], [6], 2)
    assert [c.index for c in discarded([first, again, onward])] == [0]
    other = replace(call([8], [8], 3), thread="sub-agent")  # the last of its own thread
    assert [c.index for c in discarded([first, again, onward, other])] == [0]


def test_r11_turns_the_harness_wrote_itself_are_context() -> None:
    few_shot = [1, 2, 3, 4]  # an assistant's turn among them, which nobody sampled
    (sample,) = build(call(few_shot, [5]), call([*few_shot, 5, 6], [7], 1))
    assert sample.mask.tolist() == [False] * 4 + [True, False, True]
