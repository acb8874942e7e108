"""Tensor files: whole or absent, checked to the last bit, readable only as what they are."""

import errno
import json
import os
import stat
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fisherfold.files import (
    HEADER,
    MODEL,
    atomic,
    check_model_folder,
    check_place,
    claimed,
    model_folder,
    read_tensors,
    write_atomically,
    write_tensors,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def write(path, tensors=None, **options):
    tensors = {"a": torch.arange(6.0).reshape(2, 3)} if tensors is None else tensors
    write_tensors(path, tensors, **({"kind": "thing", "version": 2, "header": {}} | options))


def read(path, **options):
    return read_tensors(path, **({"kind": "thing", "version": 2} | options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_every_dtype_and_shape_comes_back_to_the_bit(tmp_path, dtype, shape):
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    write(tmp_path / "f", {"some/name.weight": tensor})
    tensors, _ = read(tmp_path / "f")
    assert tensors["some/name.weight"].dtype == dtype
    assert tensors["some/name.weight"].shape == tensor.shape
    assert torch.equal(tensors["some/name.weight"], tensor)


def test_not_a_number_and_infinities_are_kept(tmp_path):
    values = torch.tensor([float("nan"), float("inf"), -0.0, 5e-324], dtype=torch.float64)
    header = {"loss": float("nan"), "best": float("inf"), "tiny": 5e-324, "third": 1 / 3, "rows": [{"k": 1}]}
    write(tmp_path / "f", {"a": values}, header=header)
    tensors, found = read(tmp_path / "f")
    assert tensors["a"].view(torch.int64).tolist() == values.view(torch.int64).tolist()
    assert found["loss"] != found["loss"]
    assert {k: v for k, v in found.items() if k != "loss"} == {k: v for k, v in header.items() if k != "loss"}


def test_views_and_shared_memory_are_written_out(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    write(tmp_path / "f", {"base": base, "same": base, "turned": base.T, "part": base[1:, ::2]})
    tensors, _ = read(tmp_path / "f")
    assert torch.equal(tensors["same"], base)
    assert torch.equal(tensors["turned"], base.T)
    assert torch.equal(tensors["part"], base[1:, ::2])


def test_gradients_are_left_behind(tmp_path):
    write(tmp_path / "f", {"a": torch.ones(2, requires_grad=True)})
    assert not read(tmp_path / "f")[0]["a"].requires_grad


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(tmp_path, position, bit):
    """Anywhere: in the tensors, in the checksum, in the numbers of the header."""
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
        # a bit of the padding or of an escaped space may be free to change, what is read may not
        message = str(path)
        assert torch.equal(tensors["a"], torch.arange(6.0).reshape(2, 3))
        assert header == {"sigma": 0.1234567890123, "rejections": 3}
    assert str(path) in message


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 60, -1])
def test_truncated_files_are_damaged(tmp_path, keep):
    write(tmp_path / "f")
    content = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(content[:keep])
    with pytest.raises(ValueError, match="f is damaged or not a thing file of fisherfold"):
        read(tmp_path / "f")


def test_changed_tensors_are_damaged(tmp_path):
    write(tmp_path / "f")
    content = bytearray((tmp_path / "f").read_bytes())
    content[-1] ^= 1
    (tmp_path / "f").write_bytes(bytes(content))
    with pytest.raises(ValueError, match="f is damaged: its checksum does not match"):
        read(tmp_path / "f")


def test_other_kinds_newer_versions_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "f"
    write(path)
    with pytest.raises(ValueError, match="f is not a checkpoint file of fisherfold"):
        read(path, kind="checkpoint")
    write(path, version=3)
    with pytest.raises(ValueError, match="f has version 3 of the thing format, at most 2 is known here"):
        read(path)
    write(path, version=1)
    assert read(path)[1] == {}
    path.write_text("user,item,rating\n1,2,3\n" * 10)
    with pytest.raises(ValueError, match="f is damaged or not a thing file of fisherfold"):
        read(path)
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="f is not a thing file of fisherfold"):
        read(path)
    for content in ("[1, 2]", '{"kind": "thing"}', '{"kind": "thing", "version": "new", "header": {}}', "{"):
        save_file({"a": torch.zeros(2)}, path, metadata={HEADER: content})
        with pytest.raises(ValueError, match=r"f (is|has)"):
            read(path)
    save_file({"a": torch.zeros(2)}, path, metadata={HEADER: json.dumps({"kind": "thing", "version": 1})})
    with pytest.raises(ValueError, match="f is damaged: its checksum does not match"):
        read(path)


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nothing"):
        read(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"cannot write .*f: the folder .*sub does not exist"):
        write(tmp_path / "sub" / "f")
    with pytest.raises(IsADirectoryError, match=r"cannot write .*: it is a folder"):
        write(tmp_path)


def test_a_read_only_folder_is_named(tmp_path, monkeypatch):
    """Root may write anywhere, so the refusal of the system is played."""

    def refuse(path, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(atomic.Path, "open", refuse)
    with pytest.raises(PermissionError, match=r"cannot write .*f: the folder .* is read-only"):
        write(tmp_path / "f")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write to a read-only folder")
def test_a_truly_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="is read-only"):
            write(tmp_path / "f")
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch, error):
    write_atomically(tmp_path / "f", b"old")

    def fail(_):
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)):
        write_atomically(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_takes_back_its_own_folders_only(tmp_path, error):
    def save(name, *, fails, meanwhile=None):
        with model_folder(tmp_path / name, "thing") as folder:
            write(folder / MODEL)
            if meanwhile is not None:
                save(meanwhile, fails=False)
            if fails:
                raise error
            write_atomically(folder / "model.json", b"{}")

    def left():
        return sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))

    with pytest.raises(type(error)):
        save("deep/down/a", fails=True)
    assert left() == []
    with pytest.raises(type(error)):
        save("runs/a", fails=True, meanwhile="runs/b")
    whole = ["runs", "runs/b", f"runs/b/{MODEL}", "runs/b/model.json"]
    assert left() == sorted(whole)
    with pytest.raises(type(error)):
        save("runs/c", fails=True, meanwhile="runs/c")  # two writers of one model
    assert left() == sorted([*whole, "runs/c", f"runs/c/{MODEL}", "runs/c/model.json"])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are text")
def test_a_name_that_is_no_text_is_not_taken_for_damage(tmp_path):
    path = tmp_path / "caf\udce9"
    write(path)
    with pytest.raises(ValueError, match="cannot be read: its name, or that of its folder, is not UTF-8; rename it"):
        read(path)
    path.rename(tmp_path / "cafe")
    read(tmp_path / "cafe")


@pytest.mark.skipif(os.name != "posix", reason="pipes with names")
def test_devices_and_pipes_are_not_replaced_by_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=rf"cannot write .*{name}: it is a device or a pipe, a file is expected"):
            write_atomically(tmp_path / name, b"new")
        with pytest.raises(OSError, match=rf"checkpoint .*{name} must be a file, it is a device or a pipe"):
            check_place(tmp_path / name, "checkpoint")
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "pipe").rename(tmp_path / "model.safetensors")
    with pytest.raises(OSError, match=r"the model .*model.safetensors must be a file, it is a device or a pipe"):
        check_model_folder(tmp_path, "completion")


@pytest.mark.skipif(os.name != "posix", reason="links need rights elsewhere")
def test_a_link_stays_and_what_it_points_to_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "f")
    for content in (b"first", b"second"):
        write_atomically(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "disk" / "f").read_bytes() == content
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["f"]


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_a_finished_file_has_the_rights_of_any_new_file(tmp_path):
    write_atomically(tmp_path / "ours", b"")
    Path(tmp_path / "plain").write_bytes(b"")
    ours, plain = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "plain"))
    assert ours == plain


@pytest.mark.skipif(os.name != "posix", reason="file modes")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o440])
def test_a_file_that_is_replaced_hands_on_its_permissions(tmp_path, mode):
    write_atomically(tmp_path / "f", b"old")
    (tmp_path / "f").chmod(mode)
    write_atomically(tmp_path / "f", b"new")
    assert (tmp_path / "f").stat().st_mode & 0o777 == mode | 0o200
    assert (tmp_path / "f").read_bytes() == b"new"


def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        write(tmp_path / "f", header={"x": torch.zeros(2)})
    assert not (tmp_path / "f").exists()


@pytest.mark.skipif(atomic.fcntl is None, reason="needs a system with locks")
def test_a_claim_is_given_where_the_file_system_has_no_locks(tmp_path, monkeypatch):
    def without(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(atomic.fcntl, "flock", without)
    with claimed(tmp_path / "claim") as mine:
        assert mine
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write .*: .* is not a folder"), claimed(tmp_path / "file" / "claim"):
        pass
