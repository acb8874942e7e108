"""Tensor files: whole or absent, checked to the last bit, readable only as what they are."""

import json
import os
import stat

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fisherfold.files import HEADER, check_place, read_tensors, write_atomically, write_tensors

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
]
posix = pytest.mark.skipif(os.name != "posix", reason="pipes, links and modes of POSIX")


def write(path, tensors=None, **options):
    tensors = {"a": torch.arange(6.0).reshape(2, 3)} if tensors is None else tensors
    write_tensors(path, tensors, **({"kind": "thing", "version": 2, "header": {}} | options))


def read(path, **options):
    return read_tensors(path, **({"kind": "thing", "version": 2} | options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_every_dtype_and_shape_comes_back_to_the_bit(tmp_path, dtype, shape):
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    write(
        tmp_path / "f",
        {"some/name.weight": tensor, "again": tensor, "turned": tensor.reshape(-1).flip(0)},
    )
    tensors, _ = read(tmp_path / "f")
    assert tensors["some/name.weight"].dtype == dtype
    assert torch.equal(tensors["again"], tensor)


def test_not_a_number_and_infinities_are_kept(tmp_path):
    values = torch.tensor([float("nan"), float("inf"), -0.0, 5e-324], dtype=torch.float64)
    header = {"best": float("inf"), "tiny": 5e-324, "third": 1 / 3, "rows": [{"k": 1}]}
    write(tmp_path / "f", {"a": values}, header=header | {"loss": float("nan")})
    tensors, found = read(tmp_path / "f")
    assert tensors["a"].view(torch.int64).tolist() == values.view(torch.int64).tolist()
    assert str(found.pop("loss")) == "nan"
    assert found == header


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(tmp_path, position, bit):
    path = tmp_path / "f"
    write(path, header={"sigma": 0.1234567890123, "rejections": 3})
    content = bytearray(path.read_bytes())
    content[int(position * len(content))] ^= 1 << bit
    path.write_bytes(bytes(content))
    try:
        tensors, header = read(path)
    except ValueError as error:
        message = str(error)
    else:
        message = str(path)
        # a bit of the padding or of an escaped space may be free to change, what is read may not
        assert torch.equal(tensors["a"], torch.arange(6.0).reshape(2, 3))
        assert header == {"sigma": 0.1234567890123, "rejections": 3}
    assert str(path) in message


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 60, -1])
def test_truncated_files_are_damaged(tmp_path, keep):
    write(tmp_path / "f")
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"f is damaged or not a thing file of fisherfold"):
        read(tmp_path / "f")


def test_other_kinds_newer_versions_and_foreign_files_are_named(tmp_path):
    path = tmp_path / "f"
    write(path)
    with pytest.raises(
        ValueError, match=r"f is not a checkpoint file of fisherfold: it holds a thing"
    ):
        read(path, kind="checkpoint")
    write(path, version=3)
    with pytest.raises(
        ValueError, match=r"f has version 3 of the thing format, at most 2 is known here"
    ):
        read(path)
    path.write_text("user,item,rating\n1,2,3\n" * 10)
    with pytest.raises(ValueError, match=r"f is damaged or not a thing file of fisherfold"):
        read(path)
    for content in (
        None,
        "[1, 2]",
        '{"kind": "thing"}',
        '{"kind": "thing", "version": "new", "header": {}}',
        "{",
    ):
        save_file(
            {"a": torch.zeros(2)}, path, metadata=None if content is None else {HEADER: content}
        )
        with pytest.raises(ValueError, match=r"f (is|has)"):
            read(path)
    save_file(
        {"a": torch.zeros(2)},
        path,
        metadata={HEADER: json.dumps({"kind": "thing", "version": 1, "header": {}})},
    )
    with pytest.raises(ValueError, match=r"f is damaged: its checksum does not match"):
        read(path)


def test_missing_files_and_folders_are_named(tmp_path):
    for place in (tmp_path / "nothing", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"there is no file"):
            read(place)
    with pytest.raises(
        FileNotFoundError, match=r"cannot write .*f: the folder .*sub does not exist"
    ):
        write(tmp_path / "sub" / "f")
    with pytest.raises(IsADirectoryError, match=r"cannot write .*: it is a folder"):
        write(tmp_path)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), OSError(13, "no"), KeyboardInterrupt()]
)
def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch, error):
    write_atomically(tmp_path / "f", b"old")

    def fail(_):
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    message = {28: "No space left on device", 13: "is writable, so it may be the umask"}.get(
        getattr(error, "errno", 0), "^$"
    )
    with pytest.raises(type(error), match=message):
        write_atomically(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_leftovers_of_killed_writers_are_removed_after_a_day(tmp_path):
    old, folder, foreign, young = (
        tmp_path / f".f.{end}" for end in ("0" * 12, "1" * 12, "notours", "2" * 12)
    )
    folder.mkdir()
    for left in (old, foreign, young):
        left.touch()
    for left in (old, folder, foreign):
        os.utime(left, (0, 0))
    write_atomically(tmp_path / "f", b"new")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["f", young.name, foreign.name])


@posix
def test_devices_and_pipes_are_not_replaced_by_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(
            OSError, match=rf"cannot write .*{name}: it is a device or a pipe, a file is expected"
        ):
            write_atomically(tmp_path / name, b"new")
        with pytest.raises(OSError, match=rf"checkpoint .*{name}: it is a device or a pipe"):
            check_place(tmp_path / name, "checkpoint")
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()


@posix
def test_a_link_stays_and_what_it_points_to_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "f")
    for content in (b"first", b"second"):
        write_atomically(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "disk" / "f").read_bytes() == content


@posix
@pytest.mark.parametrize("mode", [None, 0o600, 0o640, 0o440])
def test_a_file_has_the_permissions_of_the_one_it_replaces_or_of_any_new_file(tmp_path, mode):
    (tmp_path / "plain").touch()
    if mode is not None:
        write_atomically(tmp_path / "f", b"old")
        (tmp_path / "f").chmod(mode)
    write_atomically(tmp_path / "f", b"new")
    expected = stat.S_IMODE((tmp_path / "plain").stat().st_mode) if mode is None else mode
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == expected


def test_what_json_cannot_hold_is_rejected_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match=r"not JSON serializable"):
        write(tmp_path / "f", header={"x": torch.zeros(2)})
    assert not list(tmp_path.iterdir())
