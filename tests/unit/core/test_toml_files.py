from __future__ import annotations

from pathlib import Path

from bench.core.files import read_toml


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    """Editors on Windows write one at the start of UTF-8 files."""
    path = tmp_path / "sweep.toml"
    path.write_bytes(b"\xef\xbb\xbfseeds = '1-3'\n")
    assert read_toml(path, "sweep file") == {"seeds": "1-3"}
