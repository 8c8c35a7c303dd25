"""json_to_parquet: every row accounted for, nothing on both sides, the same files for the same seed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recipes.common import arithmetic
from recipes.common.data_scripts import digest_of, text_lines
from recipes.r1_zero.json_to_parquet import SYSTEM_TEMPLATE, convert, main, same_side_key

REAL_DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "deepscaler_math_aime.json"


def write_json(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def problems(count: int) -> list[dict[str, str]]:
    return [{"problem": f"What is {i} + 1?", "answer": str(i + 1), "solution": "count"} for i in range(count)]


def texts(path: Path) -> list[str]:
    return [row["prompt"][1]["content"] for row in pq.read_table(path).to_pylist()]


def test_rows_have_verls_schema(tmp_path: Path) -> None:
    source = write_json(tmp_path / "in.json", problems(20))
    assert main(["--json_path", str(source), "--output_dir", str(tmp_path / "out")]) == 0
    table = pq.read_table(tmp_path / "out" / "train.parquet")
    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert table.num_rows == 18
    row = table.to_pylist()[0]
    assert row["data_source"] == "deepscaler"
    assert row["ability"] == "math"
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["reward_model"]["style"] == "rule"
    index = row["extra_info"]["index"]
    assert row["prompt"][1]["content"] == f"What is {index} + 1?"
    assert row["reward_model"]["ground_truth"] == str(index + 1)
    assert row["extra_info"] == {"split": "train", "index": index, "answer": "count"}
    system = row["prompt"][0]["content"]
    assert system == SYSTEM_TEMPLATE
    assert system.endswith("Put your final answer within \\boxed{}. ")
    assert system.count("\\") == 1


def test_same_seed_same_files_and_shuffled(tmp_path: Path) -> None:
    source = write_json(tmp_path / "in.json", problems(50))
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        convert(source, tmp_path / name, seed=seed)
    first = (tmp_path / "a" / "train.parquet").read_bytes()
    assert first == (tmp_path / "b" / "train.parquet").read_bytes()
    assert texts(tmp_path / "a" / "train.parquet") != texts(tmp_path / "c" / "train.parquet")
    assert texts(tmp_path / "a" / "train.parquet") != [f"What is {i} + 1?" for i in range(45)]


def test_unusable_rows_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[object] = list(problems(10))
    rows += [
        {"problem": "null", "answer": None, "solution": ""},
        {"problem": "no answer"},
        {"answer": "3"},
        {"problem": " ", "answer": "3"},
        "text",
        {"problem": "list", "answer": ["3"]},
        {"problem": "number", "answer": 7},
    ]
    source = write_json(tmp_path / "in.json", rows)
    assert main(["--json_path", str(source), "--output_dir", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "data_report.json").read_text())
    assert {entry["index"]: entry["reason"] for entry in report["skipped"]} == {
        10: "answer is null",
        11: "answer is missing",
        12: "problem is missing",
        13: "problem is empty",
        14: "is a str, not an object",
        15: "answer is a list, not a text or a number",
    }
    assert report["train_rows"] + report["test_rows"] == 11
    assert "skipped row 10: answer is null" in capsys.readouterr().out
    both = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    both += pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert {row["reward_model"]["ground_truth"] for row in both if row["prompt"][1]["content"] == "number"} == {"7"}


def test_duplicates_go_and_near_duplicates_stay_on_one_side(tmp_path: Path) -> None:
    rows = [{"problem": f"Find $x$ if $x = {i}$.", "answer": str(i), "solution": ""} for i in range(40)]
    rows += [{"problem": f"Find  $x$\nif $x = {i}$.", "answer": str(i), "solution": ""} for i in range(40)]
    rows += [{"problem": f"find x if x = {i}", "answer": str(i), "solution": ""} for i in range(40)]
    source = write_json(tmp_path / "in.json", rows)
    report = convert(source, tmp_path / "out", train_data_ratio=0.5)
    assert report is not None
    assert len(report.duplicates) == 40
    assert report.train_rows == report.test_rows == 40
    train, test = (set(map(same_side_key, texts(tmp_path / "out" / f"{side}.parquet"))) for side in ("train", "test"))
    assert not train & test


def test_conflicting_duplicate_is_reported(tmp_path: Path) -> None:
    rows = [*problems(5), {"problem": "What is 0 + 1?", "answer": "5", "solution": ""}]
    report = convert(write_json(tmp_path / "in.json", rows), tmp_path / "out")
    assert report is not None
    assert report.duplicates == [{"index": 5, "same_as": 0, "same_answer": False}]
    assert any("row 5 repeats row 0 with another answer" in line for line in report.lines())


def test_second_run_does_nothing_until_something_changes(tmp_path: Path) -> None:
    source = write_json(tmp_path / "in.json", problems(20))
    out = tmp_path / "out"
    assert convert(source, out) is not None
    assert convert(source, out) is None
    assert convert(source, out, seed=7) is not None
    (out / "test.parquet").unlink()
    assert convert(source, out, seed=7) is not None
    write_json(source, problems(21))
    assert convert(source, out, seed=7) is not None
    (out / ".stamp.json").write_text("{")
    assert convert(source, out, seed=7) is not None
    assert not [path for path in out.iterdir() if ".tmp" in path.name]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not a JSON text"),
        ('{"problem": 1}\n{"problem": 2}', "not a JSON text"),
        ('{"problem": "a", "answer": "b"}', "holds a dict"),
        ("[]", "an empty list"),
        ('[{"question": "a"}]', "none of its 1 rows"),
    ],
)
def test_a_file_that_is_no_such_list_is_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, complaint: str
) -> None:
    source = tmp_path / "in.json"
    source.write_text(content)
    assert main(["--json_path", str(source), "--output_dir", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().out
    assert complaint in message
    assert str(source) in message
    assert not (tmp_path / "out").exists()


def test_missing_file_and_bad_ratio_are_errors(tmp_path: Path) -> None:
    assert main(["--json_path", str(tmp_path / "nothing.json"), "--output_dir", str(tmp_path / "out")]) == 2
    source = write_json(tmp_path / "in.json", problems(20))
    for ratio in ("0", "1", "0.001"):
        assert main(["--json_path", str(source), "--output_dir", str(tmp_path), "--train_data_ratio", ratio]) == 2
    with pytest.raises(ValueError, match="filter together"):
        convert(source, tmp_path / "out", tokenizer="somewhere")


def test_arithmetic_set_is_right_different_and_repeatable() -> None:
    rows = arithmetic.make_set(3000, seed=42)
    assert rows == arithmetic.make_set(3000, seed=42)
    assert rows != arithmetic.make_set(3000, seed=43)
    assert len({row["problem"] for row in rows}) == 3000
    functions: dict[str, Callable[[list[int]], int]] = {"+": sum, "largest": max, "smallest": min}
    for row in rows:
        numbers = [int(word) for word in re.findall(r"\d+", row["problem"])]
        word = next(word for word in functions if f" {word} " in row["problem"])
        assert int(row["answer"]) == functions[word](numbers)
        assert row["solution"].endswith(f"= {row['answer']}")
    with pytest.raises(ValueError, match="num_problems"):
        arithmetic.make_set(10**6)


@pytest.mark.skipif(not REAL_DATA.is_file(), reason=f"{REAL_DATA} is not on this machine")
def test_real_file_every_row_accounted_for(tmp_path: Path) -> None:
    report = convert(REAL_DATA, tmp_path)
    assert report is not None
    assert report.rows_read == 8449
    accounted = len(report.skipped) + len(report.duplicates) + report.train_rows + report.test_rows
    assert accounted == 8449
    assert [e["index"] for e in report.skipped if e["reason"] == "answer is null"] == [1861, 1984]
    train, test = texts(tmp_path / "train.parquet"), texts(tmp_path / "test.parquet")
    assert not {" ".join(t.split()) for t in train} & {" ".join(t.split()) for t in test}


def test_lines_of_a_file(tmp_path: Path) -> None:
    """JSON may hold other separators of lines as they are; bytes that are no text are no rows."""
    (tmp_path / "lines.jsonl").write_text('{"a": "\u2028\x85"}\n{}\n', encoding="utf-8")
    assert text_lines(tmp_path / "lines.jsonl") == ['{"a": "\u2028\x85"}', "{}"]
    (tmp_path / "windows.jsonl").write_bytes(b"\xef\xbb\xbf{}\r\n{}\r\n")  # with the mark of Windows' editors
    assert text_lines(tmp_path / "windows.jsonl") == ["{}", "{}"]
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(128, 256)))
    with pytest.raises(ValueError, match=r"binary.jsonl is not a UTF-8 text"):
        text_lines(tmp_path / "binary.jsonl")


def test_a_large_input_is_known_by_its_content_alone(tmp_path: Path) -> None:
    """A copied or newly fetched data set is the same training; 64 MiB were once the limit of what was read."""
    first, copied, other = (tmp_path / name / "data.jsonl" for name in "abc")
    for path, last in ((first, b"x"), (copied, b"x"), (other, b"y")):
        path.parent.mkdir()
        with path.open("wb") as file:
            file.seek(64 * 2**20)
            file.write(last)
        os.utime(path, (len(str(path)), 1 if path == copied else 2))
    assert digest_of({}, [first]) == digest_of({}, [copied]) != digest_of({}, [other])
