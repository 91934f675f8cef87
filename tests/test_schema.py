"""The records on disk, pinned: fields are added, never renamed or retyped."""

from __future__ import annotations

import pyarrow as pa

from lightning_ray.schema import Event, Outcome, arrow_schema, from_table, to_table
from lightning_ray.store import TABLES

GOLDEN = {
    "rollouts": """\
rollout_id: string not null
group_id: string not null
task: struct<task_id: string not null, data_json: string not null> not null
mode: string not null
step: int64 not null
attempt: int64 not null""",
    "calls": """\
call_id: string not null
rollout_id: string not null
attempt: int64 not null
index: int64 not null
dialect: string not null
status: int64 not null
error: string
prompt_ids: list<item: int32> not null
sampled_ids: list<item: int32> not null
logprobs: list<item: float> not null
versions: list<item: int32> not null
finish_reason: string
started_at: double not null
duration_s: double not null
request: large_binary not null
response: large_binary not null
exchange_id: string
kind: string
thread: string
client_json: string
rendered_ids: list<item: int32>
joined: string
parent_call_id: string
prompt_shared: int64 not null
request_head: int64 not null
request_tail: int64 not null
rendered_shared: int64""",
    "events": """\
rollout_id: string not null
attempt: int64 not null
at: double not null
kind: string not null
data_json: string not null""",
    "outcomes": """\
rollout_id: string not null
attempt: int64 not null
group_id: string not null
kind: string not null
reward: double
message: string not null
num_calls: int64 not null
started_at: double not null
queued_s: double not null
running_s: double not null""",
}


def test_the_arrow_schemas_are_the_golden_ones() -> None:
    for name, record in TABLES.items():
        schema: pa.Schema = arrow_schema(record)
        found = "\n".join(str(field).replace("pyarrow.Field<", "").rstrip(">") for field in schema)
        expected = GOLDEN[name]
        assert [line.split(":")[0] for line in found.splitlines()] == [
            line.split(":")[0] for line in expected.splitlines()
        ]
        rendered = schema.to_string(show_field_metadata=False, show_schema_metadata=False)
        top = [line for line in rendered.splitlines() if not line.startswith("  child")]
        assert "\n".join(top) == expected
        assert schema.metadata == {b"schema_version": b"2"}


def test_records_to_a_table_and_back_are_the_same() -> None:
    outcome = Outcome(
        rollout_id="r", attempt=1, group_id="g", kind="timeout", reward=None, message="late",
        num_calls=0, started_at=1.0, queued_s=0.0, running_s=2.0,
    )  # fmt: skip
    event = Event(rollout_id="r", attempt=0, at=1.0, kind="k", data_json="{}")
    assert from_table(to_table([outcome], Outcome), Outcome) == [outcome]
    assert from_table(to_table([event, event], Event), Event) == [event, event]
    assert from_table(to_table([], Event), Event) == []
