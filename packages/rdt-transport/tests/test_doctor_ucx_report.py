from pathlib import Path

import pytest

from rdt_transport.doctor.ucx_report import ReadPath, read_path, read_paths, read_transport

TABLE = """\
[1.0] [vm:7:0]   | producer-1 self cfg#0                                            |
[1.0] [vm:7:0]   | remote memory read by ucp_get*(multi) into {into} from {source} |
[1.0] [vm:7:0]   +--------+-------------+-------------------------------------------+
[1.0] [vm:7:0]   | Range  | Description |                  Config                   |
[1.0] [vm:7:0]   +--------+-------------+-------------------------------------------+
[1.0] [vm:7:0]   | 0..8184 | short      | tcp/lo                                    |
[1.0] [vm:7:0]   | 8185..inf | {how} | {config} |
[1.0] [vm:7:0]   +--------+-------------+-------------------------------------------+
[1.0] [vm:7:0]   | 0..inf | short | posix/memory |
"""


def table(config: str, into: str = "host memory", source: str = "host", how: str = "zero-copy"):
    return TABLE.format(config=config, into=into, source=source, how=how)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("cma/memory", "cma"),
        ("tcp/lo", "tcp"),
        ("rc_mlx5/x:1", "rc_mlx5"),
        ("50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1", "rc_mlx5"),
        ("60% on rc_mlx5/mlx5_0:1 and 40% on tcp/eth0", "rc_mlx5+tcp"),
    ],
)
def test_the_transport_is_that_of_a_large_read(tmp_path: Path, config: str, expected: str) -> None:
    (tmp_path / "ucx-7.log").write_text(table(config))

    assert read_transport(tmp_path, 7) == expected


def test_a_log_without_reads_leaves_the_transport_unknown(tmp_path: Path) -> None:
    (tmp_path / "ucx-7.log").write_text("[1.0] [vm:7:0]   | active message by ucp_am_send* |\n")

    assert read_transport(tmp_path, 7) == "unknown"


def test_each_kind_of_memory_has_a_way_of_its_own_and_the_last_one_counts() -> None:
    text = (
        table("self/memory")
        + table("cma/memory")
        + table("cuda_ipc/cuda", "cuda/GPU0", "cuda/dev[2]")
        + table("tcp/lo", "cuda/GPU0", "host", "software emulation")
    )

    assert len(list(read_paths(text))) == 4
    assert read_path(text) == ReadPath(True, True, "cma", "zero-copy")
    gpus = read_path(text, into_host=False, from_host=False)
    assert gpus == ReadPath(False, False, "cuda_ipc", "zero-copy")
    assert not gpus.is_emulated
    mixed = read_path(text, into_host=False, from_host=True)
    assert mixed is not None and mixed.transport == "tcp" and mixed.is_emulated
    assert read_path(text, into_host=True, from_host=False) is None
