"""The search job's tasks can be won, are kept apart, and its control keeps the rewards."""

from __future__ import annotations

from jobs.search.bm25 import Index, load
from jobs.search.control import permute
from jobs.search.tasks import grade, is_fair, train, train_shuffled, validate, validate_shuffled
from tests.made import trajectory


def test_every_question_finds_its_package_first_among_three() -> None:
    texts = load()
    index = Index(texts)
    assert len(texts) == 400
    assert all(is_fair(text, index) for text in texts)
    for task in validate():
        hits = index.search(task["question"].removeprefix("Which package: "))
        assert hits[0].startswith(f"{task['answer']}: ")
        assert len(hits) == 3


def test_training_and_validation_share_no_package() -> None:
    answers = [{task["answer"] for task in tasks} for tasks in (train(), validate())]
    assert [len(names) for names in answers] == [352, 48]
    assert not answers[0] & answers[1]
    for plain, shuffled in ((train(), train_shuffled()), (validate(), validate_shuffled())):
        places = [task["order"].index(0) for task in shuffled]
        assert max(map(places.count, range(3))) - min(map(places.count, range(3))) <= 2
        assert [t["question"] for t in plain] == [t["question"] for t in shuffled]


def test_only_the_exact_name_is_rewarded(tmp_path) -> None:  # type: ignore[no-untyped-def]
    task = validate()[0]
    assert grade(task, tmp_path, "") == 0.0
    for answer, reward in ((task["answer"], 1.0), (f"{task['answer']} or another", 0.0)):
        (tmp_path / "answer.txt").write_text(answer)
        assert grade(task, tmp_path, "") == reward


def test_the_control_moves_credit_and_keeps_it() -> None:
    group = [trajectory(f"r{i}", group_id="g7") for i in range(8)]
    credit = [float(i) for i in range(8)]
    moved = permute(group, credit)
    assert sorted(moved) == credit != moved
    assert permute(group, credit) == moved
