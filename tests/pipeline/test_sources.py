"""From arguments to inputs: which files, in which order, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.small import stopped_before_the_corpus
from tests.pipeline import inputs
from tests.pipeline.inputs import arrow_bytes, build, jsonl, table, texts_of
from tokshard import build_corpus, open_corpus
from tokshard.errors import BuildError, SourceError, UsageError
from tokshard.format import names
from tokshard.pipeline.sources import formats
from tokshard.pipeline.sources.discover import discover
from tokshard.pipeline.sources.inputs import display_path
from tokshard.pipeline.sources.opening import check_unchanged
from tokshard.store import open_store

LINE = jsonl([{"text": "a"}])


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(*paths: str, content: bytes = LINE) -> None:
    for path in paths:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)


def found(*arguments: str, input_format: str | None = None) -> list[str]:
    """Each input as `argument label/relative path`."""
    discovery = discover(arguments, input_format=input_format)
    assert [source.index for source in discovery.inputs] == list(range(len(discovery.inputs)))
    return [display_path(discovery.arguments[source.argument], source.path) for source in discovery.inputs]


def test_files_keep_the_order_of_the_arguments():
    write("b.jsonl", "a.jsonl", "sub/c.jsonl")
    assert found("b.jsonl", "sub/c.jsonl", "a.jsonl") == ["b.jsonl", "c.jsonl", "a.jsonl"]


def test_a_directory_gives_all_files_below_it_in_bytewise_order_of_their_paths():
    # "-" < "." < "/" < digits < upper < lower < the bytes of "é"
    paths = ["10.jsonl", "9.jsonl", "B.jsonl", "a-b.jsonl", "a.jsonl", "a/b/c.jsonl", "a/z.jsonl", "b.jsonl", "é.jsonl"]
    write(*(f"d/{path}" for path in reversed(paths)))
    assert found("d") == [f"d/{path}" for path in paths]


file_names = st.text(alphabet="ab.-_0Zé/", min_size=1, max_size=6).map(lambda name: f"{name.strip('/.') or 'x'}.jsonl")


@given(paths=st.sets(file_names, min_size=1, max_size=8))
def test_the_order_of_a_directory_is_that_of_the_bytes_of_its_paths(paths, tmp_path_factory):
    directory = tmp_path_factory.mktemp("ordered")
    kept = set()
    for path in sorted(paths):
        place = directory / path
        if any(part.startswith(".") for part in Path(path).parts) or any(p.is_file() for p in place.parents):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.is_dir():
            place.write_bytes(LINE)
            kept.add(os.path.normpath(path))
    if kept:
        inputs_found = discover([str(directory)], input_format=None).inputs
        assert [source.path for source in inputs_found] == sorted(kept, key=os.fsencode)


class Reversed(list):
    """The entries of a directory, backwards."""

    def __init__(self, entries):
        super().__init__(sorted(entries, key=lambda entry: entry.name, reverse=True))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_the_order_does_not_depend_on_the_order_in_which_the_system_lists_files(monkeypatch):
    write(*(f"d/{sub}/{name}.jsonl" for sub in "cab" for name in "yxz"))
    expected = found("d")
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: Reversed(scandir(path)))
    assert found("d") == expected == sorted(expected)


def test_hidden_files_and_directories_are_left_out_unless_named():
    write("d/a.jsonl", "d/.hidden.jsonl", "d/.cache/b.jsonl")
    assert found("d") == ["d/a.jsonl"]
    assert found("d/.hidden.jsonl", "d/.cache") == [".hidden.jsonl", ".cache/b.jsonl"]
    assert discover(["d"], input_format=None).ignored == {"hidden": 2}


def test_a_glob_gives_its_files_in_bytewise_order_below_its_fixed_part():
    write("d/x/2.jsonl", "d/x/10.jsonl", "d/y/1.jsonl", "d/y/deep/3.jsonl", "d/note.md", "d/x/.hidden.jsonl")
    assert found("d/*/*.jsonl") == ["*.jsonl/x/10.jsonl", "*.jsonl/x/2.jsonl", "*.jsonl/y/1.jsonl"]
    assert found("d/**/*.jsonl") == [*found("d/*/*.jsonl"), "*.jsonl/y/deep/3.jsonl"]
    assert found("d/x/[0-9].jsonl") == ["[0-9].jsonl/2.jsonl"]


def test_a_glob_may_be_absolute_or_go_up(tmp_path, monkeypatch):
    write("d/a.jsonl", "e/b.jsonl")
    absolute = f"{tmp_path}/d/*.jsonl"
    assert [source.path for source in discover([absolute], input_format=None).inputs] == ["a.jsonl"]
    monkeypatch.chdir("d")
    assert [source.path for source in discover(["../e/*"], input_format=None).inputs] == ["b.jsonl"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file():
    write("a[1].jsonl", "a1.jsonl")
    assert found("a[1].jsonl") == ["a[1].jsonl"]


def test_formats_are_known_by_suffix_whatever_its_case():
    for name, encode in inputs.FORMATS.items():
        write(f"d/{name}", content=encode([{"text": "a"}], 1))
    write("d/A.NDJSON", "d/b.JSONL.GZ", "d/c.txt", "d/d.csv.zst", "d/e.txt.gz", "d/f.TGZ", "d/g.tar.xz")
    kinds = {source.path: (source.format, source.compression) for source in discover(["d"], input_format=None).inputs}
    assert kinds == {
        "A.NDJSON": ("jsonl", None),
        "b.JSONL.GZ": ("jsonl", "gzip"),
        "c.txt": ("txt", None),
        "d.csv.zst": ("csv", "zstd"),
        "e.txt.gz": ("txt", "gzip"),
        "plain.jsonl": ("jsonl", None),
        "members.jsonl.gz": ("jsonl", "gzip"),
        "frames.jsonl.zst": ("jsonl", "zstd"),
        "table.parquet": ("parquet", None),
        "file.arrow": ("arrow", None),
        "stream.arrow": ("arrow-stream", None),
        "plain.csv": ("csv", None),
        "members.csv.gz": ("csv", "gzip"),
        "streams.jsonl.bz2": ("jsonl", "bz2"),
        "streams.jsonl.xz": ("jsonl", "xz"),
        "lines.json": ("jsonl", None),
        "file.feather": ("arrow", None),
        "plain.tsv": ("tsv", None),
        "members.tar": ("tar", None),
        "members.tar.zst": ("tar", "zstd"),
        "f.TGZ": ("tar", "gzip"),
        "g.tar.xz": ("tar", "xz"),
    }


def test_the_format_option_reads_every_file_as_one_format():
    write("d/a", "d/b.txt", "d/c.json", "d/d.log.gz")
    assert found("d", input_format="jsonl") == ["d/a", "d/b.txt", "d/c.json", "d/d.log.gz"]
    assert {source.format for source in discover(["d"], input_format="jsonl").inputs} == {"jsonl"}


def test_files_of_unknown_format_in_a_directory_are_counted_by_suffix(tmp_path):
    write("d/a.jsonl", "d/b.md", "d/sub/c.md", "d/README", "d/x.parquet.gz", "e/a.jsonl", "e/f.md")
    assert discover(["d", "e"], input_format=None).ignored == {".gz": 1, ".md": 3, "no suffix": 1}
    tokenizer = inputs.write_byte_tokenizer(tmp_path / "tokenizer")
    result = build_corpus(["d", "e"], tokenizer=tokenizer, out=tmp_path / "out", workers=1)
    assert result.ignored == {".gz": 1, ".md": 3, "no suffix": 1}


def test_a_named_file_of_unknown_format_is_refused():
    write("a.md")
    with pytest.raises(UsageError, match=r"a\.md: the name does not tell the format") as caught:
        discover(["a.md"], input_format=None)
    assert caught.value.hint == "give --format, one of jsonl, parquet, arrow, txt, csv, tsv, tar"


def test_an_argument_without_an_input_says_what_it_holds_instead():
    write("d/a.jsonl", "d/b.md", "e/c.rst", "e/d.rst")
    Path("empty").mkdir()
    with pytest.raises(UsageError, match=r"(?m)^e holds no input; it has 2 x \.rst$") as caught:
        discover(["d", "e"], input_format=None)
    assert "known suffixes are .jsonl, .ndjson, .json, .parquet" in caught.value.hint
    for argument, problem in (("empty", "empty holds no input"), ("d/*.zst", r"d/\*\.zst matches no file")):
        with pytest.raises(UsageError, match=rf"(?m)^{problem}$"):
            discover([argument], input_format=None)


def test_a_missing_argument_is_named():
    with pytest.raises(UsageError, match=r"(?m)^data/none\.jsonl does not exist$") as caught:
        discover(["data/none.jsonl"], input_format=None)
    assert "quote a glob" in caught.value.hint


def test_a_uri_of_an_unknown_scheme_is_refused():
    with pytest.raises(UsageError, match=r"ftp://host/a\.jsonl is a URI"):
        discover(["ftp://host/a.jsonl"], input_format=None)


def test_no_source_at_all_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no source is given"):
        build([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["d/a.jsonl", "d/a.jsonl"],
        ["d/a.jsonl", "d/../d/a.jsonl"],
        ["d", "d/a.jsonl"],
        ["d/*.jsonl", "d"],
        ["d", "link-to-d"],
        ["link.jsonl", "d/a.jsonl"],
        ["hard.jsonl", "d/a.jsonl"],
        ["*.jsonl", "d"],
    ],
)
def test_an_input_named_twice_is_refused_with_both_its_names(arguments):
    write("d/a.jsonl")
    os.symlink("d", "link-to-d")
    os.symlink("d/a.jsonl", "link.jsonl")
    os.link("d/a.jsonl", "hard.jsonl")
    with pytest.raises(UsageError, match=r"is an input twice: .*\.jsonl is the same file"):
        discover(arguments, input_format=None)


def test_two_links_to_one_file_in_a_directory_are_one_input_too_many():
    write("d/a.jsonl")
    os.symlink("a.jsonl", "d/b.jsonl")
    with pytest.raises(UsageError, match=r"(?m)^d/b\.jsonl is an input twice: d/a\.jsonl is the same file$"):
        discover(["d"], input_format=None)


def test_a_directory_reached_twice_is_refused_rather_than_left_out():
    write("d/a/x.jsonl")
    os.symlink("a", "d/b")
    with pytest.raises(UsageError, match=r"(?m)^d/b/x\.jsonl is an input twice: d/a/x\.jsonl is the same file$"):
        discover(["d"], input_format=None)


def test_links_to_files_and_directories_elsewhere_are_followed():
    write("elsewhere/sub/a.jsonl", "elsewhere/b.jsonl", "d/c.jsonl")
    os.symlink("../elsewhere/sub", "d/linked")
    os.symlink("../elsewhere/b.jsonl", "d/b.jsonl")
    assert found("d") == ["d/b.jsonl", "d/c.jsonl", "d/linked/a.jsonl"]


def test_a_directory_that_links_to_itself_is_read_once():
    write("d/sub/a.jsonl")
    os.symlink("..", "d/sub/up")
    os.symlink(".", "d/same")
    os.symlink(".", "d/sub/same")
    assert found("d") == ["d/sub/a.jsonl"]


def test_a_link_to_nothing_is_named():
    write("d/a.jsonl")
    os.symlink("gone.jsonl", "d/b.jsonl")
    with pytest.raises(
        SourceError, match=r"^d/b\.jsonl cannot be read: No such file or directory: it is a link to"
    ) as caught:
        discover(["d"], input_format=None)
    assert caught.value.hint.endswith("or leave such files out with --on-bad-source skip")


@pytest.mark.parametrize("name", ["d/b.jsonl", "d/b.arrow", "d/b.txt"])
def test_a_link_to_nothing_is_left_out_and_listed_if_that_is_asked_for(name, tmp_path):
    write("d/a.jsonl")
    os.symlink("gone", name)
    corpus = inputs.build("d", tmp_path / "out", on_bad_source="skip")
    assert [source.left_out for source in corpus.sources()] == [{}, {"damaged input": 1}]
    (reject,) = map(json.loads, (tmp_path / "out" / "rejects.jsonl").read_text().splitlines())
    assert (reject["source"], reject["reason"]) == (name, "damaged input")


def test_a_directory_that_cannot_be_listed_is_named(monkeypatch):
    write("d/a.jsonl", "d/locked/b.jsonl")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match=r"(?m)^d/locked cannot be listed: Permission denied$"):
        discover(["d"], input_format=None)


def test_what_is_no_regular_file_is_refused():
    Path("d").mkdir()
    os.mkfifo("d/pipe.jsonl")
    for argument in ("d", "d/pipe.jsonl"):
        with pytest.raises(UsageError, match=r"pipe\.jsonl is not a regular file"):
            discover([argument], input_format=None)


def test_a_name_that_is_not_utf_8_is_refused(tmp_path):
    Path("d").mkdir()
    with open(b"d/\xff.jsonl", "wb") as file:
        file.write(LINE)
    with pytest.raises(UsageError, match=r"b'd/\\xff\.jsonl': the path is not UTF-8"):
        build("d", tmp_path / "out")


@pytest.mark.parametrize("out", ["d", "d/out", "d/sub/out", "link/out"])
def test_an_out_inside_of_a_source_is_refused(out):
    write("d/a.jsonl", "d/sub/b.jsonl")
    os.symlink("d", "link")
    with pytest.raises(UsageError, match=f"--out {out} lies inside the source d") as caught:
        build("d", Path(out))
    assert caught.value.hint == "give an --out outside of the sources"
    assert not Path("d/out").exists()


@pytest.mark.parametrize(
    ("pattern", "out"),
    [
        ("d/**/*", "d/out"),
        ("d/**", "d/sub/out"),
        ("**/*.jsonl", "d/out"),
        ("d/**/*.jsonl", "d/.out"),
        ("link/**/*.json*", "d/out"),
        ("d/**/*", "link/out"),
    ],
)
def test_an_out_below_a_glob_of_any_folders_is_refused_before_the_first_build(pattern, out):
    write("d/a.jsonl", "d/sub/b.jsonl")
    os.symlink("d", "link")
    with pytest.raises(UsageError, match=r"--out .* lies inside the source"):
        build(pattern, Path(out))
    assert not Path("d/out").exists()


@pytest.mark.parametrize(
    ("pattern", "out"),
    [("d/*/*", "d/out"), ("link/*/*.arrow", "d/out"), ("d/*/*", "link/out"), ("d/[os]u*/*", "d/out")],
)
def test_an_out_whose_shards_a_glob_finds_is_refused_and_stays_as_it_is(pattern, out):
    write("d/sub/b.jsonl")
    write("d/sub/c.arrow", content=arrow_bytes(table([{"text": "c"}])))
    os.symlink("d", "link")
    before = texts_of(build(pattern, Path(out)))
    for force in (False, True):
        with pytest.raises(UsageError, match=r"the source .* lies in --out .*, where the build writes"):
            build(pattern, Path(out), force=force)
    assert texts_of(open_corpus(out)) == before


@pytest.mark.parametrize(
    ("pattern", "out"), [("d/*.jsonl", "d/out"), ("d/**/*.jsonl", "out"), ("d/*/*.jsonl", "d/sub/out")]
)
def test_an_out_that_a_glob_does_not_reach_is_fine_the_second_time_too(pattern, out, tmp_path):
    write("d/a.jsonl", "d/sub/b.jsonl", "d/c.txt")
    first = texts_of(build(pattern, Path(out)))
    assert texts_of(build(pattern, Path(out))) == first


@pytest.mark.parametrize("argument", ["d", "d/out/shards.arrow", "d/link/rejects.jsonl"])
def test_a_source_in_out_is_refused_whatever_link_leads_there(argument):
    write("d/a.jsonl")
    build("d", Path("out"))
    write("out/rejects.jsonl")
    os.symlink("../out", "d/link" if "link" in argument else "d/out")
    with pytest.raises(UsageError, match=r"the source d/.* lies in --out out, where the build writes"):
        build(argument, Path("out"), force=True)


def test_a_source_beside_out_or_below_it_is_fine(tmp_path):
    write("d/a.jsonl")
    assert texts_of(build("d/a.jsonl", Path("d/out"))) == ["a"]


def test_mixed_formats_of_several_arguments_are_one_build(tmp_path):
    write("d/b.jsonl", content=jsonl([{"text": "jsonl"}]))
    write("d/a.txt", content=b"txt")
    write("d/c.csv", content=b"text\ncsv\n")
    write("d/d.parquet", content=inputs.parquet_bytes(inputs.table([{"text": "parquet"}])))
    write("first.jsonl.gz", content=inputs.FORMATS["members.jsonl.gz"]([{"text": "gz"}], 1))
    write("glob/x.arrow", content=inputs.arrow_bytes(inputs.table([{"text": "arrow"}])))
    corpus = build(["first.jsonl.gz", "d", "glob/*"], tmp_path / "out")
    assert texts_of(corpus) == ["gz", "txt", "jsonl", "csv", "parquet", "arrow"]
    assert corpus.manifest.arguments == ["first.jsonl.gz", "d", "*"]
    assert [(source.argument, source.path) for source in corpus.sources()] == [
        (0, ""),
        (1, "a.txt"),
        (1, "b.jsonl"),
        (1, "c.csv"),
        (1, "d.parquet"),
        (2, "x.arrow"),
    ]


def test_a_changed_input_is_named_with_both_values():
    write("a.jsonl")
    (source,) = discover(["a.jsonl"], input_format=None).inputs
    check_unchanged(source)
    os.utime("a.jsonl", ns=(5, 7))
    with pytest.raises(
        SourceError,
        match=f"was modified since the build began: its version was {source.version}, now it is 1970-01-01T",
    ):
        check_unchanged(source)
    write("a.jsonl", content=LINE * 2)
    with pytest.raises(SourceError, match=f"(?m)now it is .*/{2 * len(LINE)}$"):
        check_unchanged(source)
    os.unlink("a.jsonl")
    with pytest.raises(SourceError, match="cannot be read: No such file"):
        check_unchanged(source)


def test_every_format_that_can_be_asked_for_is_known():
    assert set(formats.INPUT_FORMATS) == {"jsonl", "parquet", "arrow", "txt", "csv", "tsv", "tar"}


def test_a_table_of_inputs_that_is_saved_goes_to_other_processes_as_a_reference(tmp_path):
    write(*(f"d/{number:04d}.jsonl" for number in range(300)))
    inputs_found = discover(["d"], input_format=None).inputs
    inputs_found.absolute().save(open_store(tmp_path), "inputs.arrow")  # the same inputs with other roots
    reference = pickle.dumps(inputs_found)
    assert len(reference) < 1_000
    assert list(pickle.loads(reference)) == list(inputs_found)


@pytest.mark.parametrize("listed", [None, b"damaged"])
def test_an_unfinished_build_of_other_sources_or_with_a_damaged_list_of_them_starts_over_by_force(listed, tmp_path):
    write("a.jsonl", "b.jsonl")
    with pytest.raises(KeyboardInterrupt), stopped_before_the_corpus(KeyboardInterrupt()):
        build("a.jsonl", tmp_path / "out")
    if listed is not None:
        (tmp_path / "out" / names.WORK / "inputs.arrow").write_bytes(listed)
        with pytest.raises(BuildError, match=r"inputs\.arrow is damaged") as caught:
            build("a.jsonl", tmp_path / "out")
        assert caught.value.hint == "start over with --force"
    assert texts_of(build(["a.jsonl", "b.jsonl"], tmp_path / "out", force=True)) == ["a", "a"]
