"""Rows from every form of source, and the message for everything that can be wrong with one."""

import csv
import json
import sys

import pytest

from megarl.checks.checklist import Checklist
from megarl.checks.files import check_source
from megarl.config.data import DataConfig
from megarl.data.rows import make_row, refuse_media
from megarl.data.sources import as_prompts, check_loader_kwargs, first_rows, load_rows, system_messages
from megarl.system.errors import ConfigError, DataError

ROWS = [
    {"question": "2+2?", "answer": "4", "level": 1, "tags": ["a", None], "meta": {"ok": True}},
    {"question": 'Ä, "b"\nc', "answer": "5", "level": 2, "tags": [], "meta": {"ok": False}},
]


def write(path, rows=ROWS):
    """Write `rows` in the form that the suffix names."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["question", "answer"], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
@pytest.mark.parametrize(("encoding", "kind", "line"), [("latin-1", "Latin-1", 2), ("utf-16", "UTF-16", 1)])
def test_files_in_another_encoding_say_which_and_how_to_convert_them(tmp_path, suffix, encoding, kind, line):
    texts = {".jsonl": '{"a": "1"}\n{"a": "\xe4"}\n', ".json": '[{"a": "1"},\n{"a": "\xe4"}]', ".csv": "a\n\xe4\n"}
    path = tmp_path / f"d{suffix}"
    path.write_bytes(texts[suffix].encode(encoding))
    with pytest.raises(DataError, match=rf"d{suffix}:{line}: not UTF-8 text(?s:.*)looks like {kind}(?s:.*)iconv -f"):
        load_rows(str(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_typed_files_keep_types(tmp_path, suffix):
    assert load_rows(str(write(tmp_path / f"d{suffix}"))) == ROWS


def test_csv_holds_text(tmp_path):
    rows = load_rows(str(write(tmp_path / "d.csv")))
    assert rows == [{"question": row["question"], "answer": row["answer"]} for row in ROWS]
    assert rows[1].where == f"{tmp_path}/d.csv:4"  # a value may span lines; the last of them is named


def test_rows_know_their_line_or_number(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [row.where for row in load_rows(f"{tmp_path}/d.jsonl")] == [f"{tmp_path}/d.jsonl:1", f"{tmp_path}/d.jsonl:3"]
    assert load_rows(str(write(tmp_path / "d.parquet")))[1].where == f"{tmp_path}/d.parquet row 2"


def test_byte_order_mark_is_no_part_of_the_data(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n')
    (tmp_path / "d.csv").write_bytes(b"\xef\xbb\xbfa\n1\n")
    assert load_rows(f"{tmp_path}/d.jsonl") == [{"a": 1}]
    assert load_rows(f"{tmp_path}/d.csv") == [{"a": "1"}]


def test_a_folder_is_all_its_files_in_order(tmp_path):
    write(tmp_path / "b.jsonl", [{"a": 2}])
    write(tmp_path / "a.json", [{"a": 1}])
    (tmp_path / "README.md").write_text("no data")
    assert load_rows(str(tmp_path)) == [{"a": 1}, {"a": 2}]


def test_what_a_repository_of_the_hub_tells_about_its_data_is_no_data(tmp_path):
    write(tmp_path / "train.jsonl", [{"a": 1}])
    (tmp_path / "dataset_infos.json").write_text('{"default": {}}')
    assert load_rows(str(tmp_path)) == [{"a": 1}]


def test_a_call_in_a_table_has_no_arguments_of_other_tools(tmp_path):
    calls = [{"function": {"name": name, "arguments": {name: 1}}} for name in ("add", "root")]
    rows = [{"messages": [{"role": "user"}, {"role": "assistant", "tool_calls": [call]}], "x": None} for call in calls]
    write(tmp_path / "d.parquet", rows)
    read = load_rows(f"{tmp_path}/d.parquet")
    assert [row["messages"][1]["tool_calls"] for row in read] == [[call] for call in calls]
    assert read[0]["x"] is None, "other nulls are what the rows hold"
    write(tmp_path / "d.jsonl", [{"messages": [{"tool_calls": [{"arguments": {"add": None}}]}]}])
    assert load_rows(f"{tmp_path}/d.jsonl")[0]["messages"] == [{"tool_calls": [{"arguments": {"add": None}}]}]


def test_hidden_files_and_folders_in_a_folder_are_no_data(tmp_path):
    (tmp_path / ".data" / ".ipynb_checkpoints").mkdir(parents=True)
    write(tmp_path / ".data" / "train.jsonl", [{"a": 1}])
    write(tmp_path / ".data" / "._train.jsonl", [{"a": 2}])
    write(tmp_path / ".data" / ".ipynb_checkpoints" / "train-checkpoint.jsonl", [{"a": 3}])
    assert load_rows(str(tmp_path / ".data")) == [{"a": 1}]


def test_links_to_folders_are_followed_once(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "set").mkdir()
    write(tmp_path / "far" / "b.jsonl", [{"a": 2}])
    write(tmp_path / "set" / "a.jsonl", [{"a": 1}])
    (tmp_path / "set" / "more").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "back").symlink_to(tmp_path / "set")
    assert load_rows(f"{tmp_path}/set") == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.ndjson", "b.tsv", "in/b.arrow", "b.TAR.zst", "b.Parquet.xz"])
def test_data_of_another_form_in_a_folder_is_named(tmp_path, name):
    write(tmp_path / "a.jsonl", [{"a": 1}])
    (tmp_path / "notes.txt.gz").touch()
    assert load_rows(str(tmp_path)) == [{"a": 1}]
    (tmp_path / "in").mkdir()
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=rf"unsupported formats(?s:.*)found: +'{name}'"):
        load_rows(str(tmp_path))
    checks = Checklist(name="data")
    check_source(str(tmp_path), "data.train_files", checks)
    assert [check.status for check in checks.items] == ["fail"]


def test_a_folder_of_several_splits_is_refused(tmp_path):
    write(tmp_path / "train.jsonl")
    write(tmp_path / "test.jsonl")
    with pytest.raises(DataError, match="several splits") as error:
        load_rows(str(tmp_path))
    assert f"{tmp_path}@train" in str(error.value)


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("no_network")
def test_a_split_of_a_folder_goes_through_datasets(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.parquet", [{"a": 1}])
    write(folder / "test.parquet", [{"a": 2}, {"a": 3}])
    rows = load_rows(f"{folder}@test")
    assert rows == [{"a": 2}, {"a": 3}]
    assert rows[1].where == f"{folder}@test row 2"


@pytest.mark.usefixtures("no_network")
def test_folders_of_save_to_disk(tmp_path):
    import datasets

    one = datasets.Dataset.from_list([{"a": 1}])
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": one, "test": datasets.Dataset.from_list([{"a": 2}])}).save_to_disk(
        str(tmp_path / "two")
    )
    assert load_rows(str(tmp_path / "one")) == [{"a": 1}]
    assert load_rows(f"{tmp_path}/two@test") == [{"a": 2}]
    with pytest.raises(DataError, match="consists of splits, and the source names none"):
        load_rows(str(tmp_path / "two"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/name@test", ("org/name", None, "test")),
        ("org/name", ("org/name", None, "train")),
        ("openai/gsm8k:main@train[:10]", ("openai/gsm8k", "main", "train[:10]")),
    ],
)
def test_hub_names_reach_load_dataset(monkeypatch, source, expected):
    import datasets

    calls = []

    def load_dataset(name, config, split):
        calls.append((name, config, split))
        return datasets.Dataset.from_list([{"a": 1}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows(source) == [{"a": 1}]
    assert calls == [expected]


def test_a_hub_failure_names_the_source(monkeypatch):
    import datasets

    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"org/name@train: the dataset cannot be loaded: ConnectionError: no route"):
        load_rows("org/name@train")


@pytest.fixture
def row_maker(tmp_path, monkeypatch):
    (tmp_path / "my_rows_module.py").write_text(
        "def numbers(count, start=0):\n    for i in range(count):\n        yield {'a': start + i}\n"
        "def bad(): return [3]\n"
        "def anything(**kwargs): return [dict(kwargs)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_rows_module"
    sys.modules.pop("my_rows_module", None)


def test_a_function_makes_rows_from_the_arguments_it_takes(row_maker):
    rows = load_rows(f"{row_maker}:numbers", {"count": 2, "start": 5, "of_another_source": 1})
    assert rows == [{"a": 5}, {"a": 6}]
    assert rows[0].where == "my_rows_module:numbers row 1"
    assert load_rows(f"{row_maker}:anything", {"x": 1}) == [{"x": 1}]


def test_a_function_that_cannot_be_called_is_told_why(row_maker):
    with pytest.raises(ConfigError, match="missing a required argument: 'count'"):
        load_rows(f"{row_maker}:numbers", {})
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_rows(f"{row_maker}:nothing_there")
    with pytest.raises(ConfigError, match="cannot be imported: No module named 'not_there_at_all'"):
        load_rows("not_there_at_all:fn")
    with pytest.raises(DataError, match="my_rows_module:bad row 1: a row must be an object"):
        load_rows(f"{row_maker}:bad")


def test_a_function_that_raises_is_named_with_its_arguments_and_line(row_maker, tmp_path):
    (tmp_path / "raising_rows.py").write_text("def rows(low):\n    yield {'a': 1}\n    yield {'a': range(low)}\n")
    with pytest.raises(DataError, match=r"raising_rows:rows: the data function raised TypeError") as caught:
        load_rows("raising_rows:rows", {"low": "a", "other": 1})
    assert caught.value.found == {"low": "a"}
    assert f"{tmp_path / 'raising_rows.py'}:3 in rows" in caught.value.fix


def test_misspelt_loader_arguments_are_refused(row_maker):
    config = DataConfig(train_files=[f"{row_maker}:numbers"], loader_kwargs={"count": 1, "stat": 2})
    with pytest.raises(ConfigError, match=r"data.loader_kwargs.stat(?s:.*)did you mean 'start'"):
        check_loader_kwargs(config)
    check_loader_kwargs(config.model_copy(update={"train_files": [f"{row_maker}:anything"]}))
    check_loader_kwargs(config, [f"{row_maker}:anything"])


# -- errors ------------------------------------------------------------------------------------------------------


def test_broken_json_line_is_named(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DataError) as error:
        load_rows(f"{tmp_path}/d.jsonl")
    assert f"{tmp_path}/d.jsonl:2: broken JSON" in str(error.value)
    assert "'{\"a\": '" in str(error.value)
    assert error.value.exit_code == 2


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b'{"a": 1}\n\xff\n')
    with pytest.raises(DataError, match=r"d.jsonl:2: not UTF-8 text: invalid"):
        load_rows(f"{tmp_path}/d.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", "[1]\n", r"d.jsonl:1: a row must be an object"),
        ("d.jsonl", "\n\n", r"d.jsonl: the source has no rows"),
        ("d.jsonl", "", r"d.jsonl: the source has no rows"),
        ("d.json", '[{"a": 1},\n{]', r"d.json:2: broken JSON"),
        ("d.json", '{"a": 1}\n{"a": 2}', r"d.json:2: broken JSON: Extra data(?s:.*) \.jsonl"),
        ("d.json", '{"a": 1}', r"d.json: the JSON file is not a list of rows"),
        ("d.json", "[[]]", r"d.json row 1: a row must be an object"),
        ("d.csv", "a,b\n1,2\n3\n", r"d.csv:3: the line has too many or too few values(?s:.*)no value for 'b'"),
        ("d.csv", "a,b\n1,2,3\n", r"d.csv:2: (?s:.*)3 values"),
        ("d.csv", "a,b\n", r"d.csv: the source has no rows"),
        ("d.csv", "a,b,a\n1,2,3\n", r"d.csv:1: the header repeats a column name(?s:.*)'a'"),
        ("d.csv", "\na\n1\n", r"d.csv:1: the header is empty"),
        ("d.json", b'[{"a":\n"\xff"}]', r"d.json:2: not UTF-8 text"),
        ("d.jsonl", '{"a": 1}\n{"a": 1, "a": 2}\n', r"d.jsonl:2: broken JSON: 'a' is repeated in one object"),
        ("d.json", '[{"a": 1}, {"a": 1, "a": 2}]', r"d.json row 2: broken JSON: 'a' is repeated in one object"),
        ("d.jsonl", '{"a": "ok"}\n{"a": "b\\ud83d"}\n', r"d.jsonl:2: column 'a' contains half of a surrogate pair"),
        ("d.jsonl", '{"a": {"b": ["\\ude00"]}}\n', r"d.jsonl:1: column 'a' contains half of a surrogate pair"),
        ("d.jsonl", '{"a\\ud83d": 1}\n', r"d.jsonl:1: a column name contains half of a surrogate pair"),
        ("d.json", '[{"a": 1}, {"a": {"\\ud83d": 1}}]', r"d.json row 2: a name in column 'a' contains half"),
        ("d.csv", 'a\n"x\n', r"d.csv:\d: broken csv"),
        ("d.parquet", "not parquet", r"d.parquet: the parquet file cannot be read"),
        ("d.parquet", "PAR1 cut", r"d.parquet: the parquet file cannot be read(?s:.*)write the file again"),
        ("d.parquet", b"\x1f\x8b\x08", r"the parquet file cannot be read(?s:.*)compressed with gzip"),
        (
            "d.jsonl",
            b"PAR1\x15\x04\n\xff",
            r"d.jsonl: the file is a parquet file, not .jsonl data(?s:.*)name it .*/d.parquet",
        ),
        ("d.json", b"PK\x03\x04", r"d.json: the file is a zip archive"),
        ("d.csv", b"\x1f\x8b\x08", r"d.csv: the file is compressed with gzip(?s:.*)d.csv > .*/d.unpacked.csv"),
        ("d.jsonl", "version https://git-lfs.github.com/spec/v1", r"d.jsonl: the file is a pointer of Git LFS"),
        ("d.jsonl.gz", b"\x1f\x8b\x08", r"unknown kind(?s:.*)gzip -dc .*/d.jsonl.gz > .*/d.jsonl$"),
        ("d.py", "x", r"unknown kind of data file(?s:.*)write d:function"),
        ("d.txt", "x", r"d.txt: unknown kind of data file(?s:.*)\.jsonl, \.json, \.csv, \.parquet"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        load_rows(str(tmp_path / name))


LONG, DEEP, DEEPER = "9" * 5000, "[" * 80 + "]" * 80, "[" * 100_000
LARGE = {
    "line of a long number": (
        "d.jsonl",
        f'{{"a": 1}}\n{{"a": {LONG}}}\n',
        r"d.jsonl:2: broken JSON: a number of more than",
    ),
    "row of a long number": (
        "d.json",
        f'[{{"a": 1}}, {{"a": {LONG}}}]',
        r"d.json row 2: broken JSON: a number of more",
    ),
    "deep line": (
        "d.jsonl",
        f'{{"a": 1}}\n{{"a": {DEEP}}}\n',
        r"d.jsonl:2: column 'a' nests lists and objects more than 64",
    ),
    "deeper line": (
        "d.jsonl",
        f'{{"a": 1}}\n{{"a": {DEEPER}\n',
        r"d.jsonl:2: broken JSON: lists and objects nested more than 64",
    ),
    "deeper row": (
        "d.json",
        f'[{{"a": 1}}, {{"a": {DEEPER}}}]',
        r"d.json row 2: broken JSON: lists and objects nested more than 64",
    ),
    "late byte": ("d.csv", b"a\n" + b"1\n" * 5000 + b"\xff\n1\n", r"d.csv:5002: not UTF-8 text"),
}


@pytest.mark.parametrize("case", LARGE)
def test_large_values_and_late_bytes_are_named(tmp_path, case):
    test_broken_files_are_named(tmp_path, *LARGE[case])


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for suffix in (".jsonl", ".json", ".csv"):
        (tmp_path / f"d{suffix}").symlink_to("/proc/self/mem")  # is there, and refuses to be read
        with pytest.raises(DataError, match=rf"d\{suffix}: the file cannot be read: Input/output error"):
            load_rows(f"{tmp_path}/d{suffix}")


def test_a_long_cell_is_read_and_the_limit_of_other_readers_stays(tmp_path):
    before = csv.field_size_limit()
    write(tmp_path / "d.csv", [{"question": "x" * 300_000, "answer": "1"}])
    assert len(load_rows(f"{tmp_path}/d.csv")[0]["question"]) == 300_000
    assert csv.field_size_limit() == before


def test_a_whole_character_outside_the_basic_plane_is_text(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"a": "\\ud83d\\ude00"}\n')
    assert load_rows(f"{tmp_path}/d.jsonl") == [{"a": "\U0001f600"}]


def test_parquet_cells_and_columns_that_cannot_be_read_are_named(tmp_path):
    import pyarrow
    import pyarrow.parquet

    offsets = pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0")
    text = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"a\xff\xfe")])
    many = pyarrow.chunked_array([pyarrow.array(["b"] * 2000), text])
    pyarrow.parquet.write_table(pyarrow.table({"a": many}), tmp_path / "bytes.parquet")
    with pytest.raises(DataError, match=r"bytes.parquet row 2002: column 'a' cannot be read: 'utf-8' codec"):
        load_rows(f"{tmp_path}/bytes.parquet")
    assert first_rows(f"{tmp_path}/bytes.parquet", 2) == [{"a": "b"}] * 2
    twice = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r"twice.parquet: two columns have the same name(?s:.*)'a'"):
        load_rows(f"{tmp_path}/twice.parquet")


def test_a_function_may_not_return_what_no_file_could_hold(row_maker, tmp_path):
    with open(tmp_path / "my_rows_module.py", "a") as file:
        file.write("def huge(): return [{'a': 1}, {'a': 10 ** 5000}]\ndef half(): return [{'a': '\\ud83d'}]\n")
    with pytest.raises(DataError, match=r"huge row 2: column 'a' contains a number of more than 4300 digits"):
        load_rows(f"{row_maker}:huge")
    with pytest.raises(DataError, match=r"half row 1: column 'a' contains half of a surrogate pair"):
        load_rows(f"{row_maker}:half")


def test_a_prompt_on_the_command_line_is_checked_as_well():
    with pytest.raises(DataError, match=r"column 'prompt' contains half of a surrogate pair") as error:
        load_rows("text:caf\udce9")  # how Python reads an argument that is not UTF-8
    str(error.value).encode()


def test_missing_file_suggests_its_neighbour(tmp_path):
    write(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"trian.jsonl: file or folder not found(?s:.*)did you mean .*/train.jsonl"):
        load_rows(f"{tmp_path}/trian.jsonl")


def test_a_missing_relative_file_is_not_taken_for_a_hub_name():
    with pytest.raises(DataError, match="not found"):
        load_rows("data/train.jsonl")


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="has no data file"):
        load_rows(str(tmp_path))


def test_values_that_are_not_plain_are_named(tmp_path):
    write(tmp_path / "d.parquet", [{"a": 1, "image": b"\x00"}])  # images may be bytes, and other columns not
    [row] = load_rows(f"{tmp_path}/d.parquet")
    with pytest.raises(DataError, match=r"d.parquet row 1: column 'image' contains images, video or sound"):
        refuse_media(row, ["a"])
    with pytest.raises(DataError, match=r"rows:fn row 2: column 'a' contains a value that is not plain data"):
        make_row({"a": {1, 2}}, "rows:fn", 2, "row")


def test_missing_column_names_row_columns_and_the_nearest(tmp_path):
    row = load_rows(str(write(tmp_path / "d.jsonl")))[1]
    with pytest.raises(DataError) as error:
        row.column("questions", "data.prompt_key")
    text = str(error.value)
    assert f"{tmp_path}/d.jsonl:2: no column 'questions'" in text
    assert "columns here: question, answer, level, tags, meta" in text
    assert "set data.prompt_key to 'question'" in text


def test_a_prompt_can_stand_in_the_recipe():
    data = as_prompts(DataConfig(val_files=["x.jsonl"], prompt_key="question", max_val_samples=1), ["1+1=", "a:b"])
    rows = [row for source in data.val_files for row in load_rows(source)]
    assert [row.column(data.prompt_key, "") for row in rows] == ["1+1=", "a:b"]
    assert (data.answer_key, data.max_val_samples) == (None, None)
    assert rows[1].where == "the prompt 'a:b'"


def test_the_first_rows_are_read_without_the_rest_of_the_file(tmp_path):
    texts = {"d.jsonl": '{"a": "1"}\n{"a": "2"}\nbroken', "d.csv": "a\n1\n2\n3,4\n", "e.jsonl": '{"a": "1"}\n'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert first_rows(f"{tmp_path}/d.jsonl", 2) == first_rows(f"{tmp_path}/d.csv", 2) == [{"a": "1"}, {"a": "2"}]
    assert first_rows(f"{tmp_path}/e.jsonl", 2) == [{"a": "1"}]


def test_system_messages_of_the_training_rows(tmp_path):
    def rows(*systems):
        messages = [
            [{"role": "system", "content": s}] * bool(s) + [{"role": "user", "content": "1+1?"}] for s in systems
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in messages))
        return system_messages(DataConfig(train_files=[str(tmp_path / "rows.jsonl")], prompt_key="messages"))

    assert rows("Be brief.", "Be brief.") == {"Be brief."}
    assert rows("Be brief.", "") == {"Be brief.", ""}
    words = DataConfig(
        train_files=["megarl.recipes.word_problems:make_rows"],
        prompt_key="messages",
        loader_kwargs={"system": "Count."},
    )
    assert system_messages(words) == {"Count."}
    assert system_messages(DataConfig(train_files=["org/name@train"])) == set()
