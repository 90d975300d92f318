"""`orch doctor`: each wrong thing is a finding that says what to do, and no check can keep the others from running."""

import json
import re
import threading

import psycopg2
import pytest
from click.testing import CliRunner

from orchestrator import doctor, doctor_database, doctor_gpu
from orchestrator.cli import root
from orchestrator.finding import Finding, guarded
from orchestrator.gpu import Gpu
from storage.errors import OrchError
from storage.url import redact

SECRET = "tr0ub4dor"
NOWHERE = f"postgresql://ann:{SECRET}@127.0.0.1:1/none"
H200 = Gpu("0", "GPU-1", "NVIDIA H200")
TORCH = {"torch": "2.14.1", "built_for": "13.0", "nccl": "2.30.7", "torchvision": "0.29.1"}
SEEN = {**TORCH, "devices": [["NVIDIA H200", 150 * 2**30, 9, 0]], "kernels": ["sm_80", "sm_90", "sm_120"]}


def nvidia_smi(folder, monkeypatch, answer, code=0):
    """Put a driver that gives this answer on PATH, and nothing else."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{answer}'\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def run_sql(url, statement):
    connection = psycopg2.connect(url)
    with connection, connection.cursor() as cursor:
        cursor.execute(statement)
    connection.close()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An ORCH_HOME of this test's own, and no storage given."""
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ORCH_STORAGE", raising=False)
    return tmp_path / "home"


def test_a_check_that_is_broken_is_a_finding_without_the_password():
    """An unexpected exception in a check becomes a warning with its first words, and never with the password."""

    def check():
        raise RuntimeError(f"cannot parse {NOWHERE}")

    found = guarded("disk", check, NOWHERE)
    assert (found.name, found.status) == ("disk", "warn")
    assert "RuntimeError" in found.says
    assert SECRET not in found.says


def test_what_orch_refuses_is_a_fail_with_its_own_sentence():
    """An OrchError in a check is something that the user can mend: its sentence is what the finding says."""

    def check():
        raise OrchError("cannot make /x: set ORCH_HOME")

    assert guarded("disk", check) == Finding(
        "disk", "fail", "cannot make /x: set ORCH_HOME", "mend that, and run `orch doctor` again"
    )


def test_a_check_that_hangs_is_left_behind():
    """A check that gives no answer within its limit is a fail, and the command goes on."""
    never = threading.Event()
    found = guarded("driver", lambda: never.wait() and None, limit_s=0.05)
    never.set()
    assert found.status == "fail"
    assert "no answer within 0.05 s" in found.says


def test_the_command_tells_all_and_exits_0_on_a_sound_machine(home):
    """--json gives every check once; a machine without GPU and without a running server has nothing that fails."""
    done = CliRunner().invoke(root, ["doctor", "--json"])
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert list(found) == [
        "python", "packages", "torch", "torchvision", "driver", "cuda", "nccl", "ray", "database", "postgresql", "disk",
        "ray's disk", "/dev/shm", "open files", "hostname",
    ]  # fmt: skip
    assert [name for name, each in found.items() if each["status"] == "fail"] == []
    assert all(each["advice"] for each in found.values() if each["status"] != "ok")
    assert done.exit_code == 0
    assert found["torchvision"]["status"] == "ok"
    assert "does not run" in found["database"]["says"]
    assert not (home / "pg").exists()


def test_the_command_exits_1_when_a_check_fails_and_hides_the_password(home, monkeypatch):
    """A database that is not there is named at the end, with what to do; the password of --storage is nowhere."""
    monkeypatch.setattr(doctor_gpu, "TORCH_PROBE", "print('{}')")  # torch has its own tests, and takes seconds
    done = CliRunner().invoke(root, ["doctor", "--storage", NOWHERE])
    assert done.exit_code == 1
    assert re.search(r"^fail  database .*\n +-> start the server, or correct ORCH_STORAGE", done.stdout, re.MULTILINE)
    assert "database" in done.stderr
    assert SECRET not in done.output


def test_a_torch_that_cannot_be_imported_is_told_with_its_reason():
    """What a probe's child process says last, when it fails or crashes, is in the finding."""
    torch = doctor_gpu.probe("raise ImportError('libcudart.so.13: cannot open')")
    assert doctor_gpu.check_torch(torch).status == "fail"
    assert "libcudart.so.13" in doctor_gpu.check_torch(torch).says
    assert doctor_gpu.check_ray(doctor_gpu.probe("import os; os.abort()")).status == "fail"


def test_a_torchvision_of_another_torch_is_a_fail_although_torch_is_fine():
    """Steps that worked before the child process failed are kept."""
    torch = doctor_gpu.probe('print(\'{"torch": "2.14", "built_for": null}\', flush=True); raise RuntimeError(\'nms\')')
    assert doctor_gpu.check_torch(torch) == Finding("torch", "ok", "2.14, built for CPU only")
    found = doctor_gpu.check_torchvision(torch)
    assert (found.status, "nms" in found.says, "pip install" in found.advice) == ("fail", True, True)


def test_a_machine_without_gpu_is_warned_and_not_failed(tmp_path, monkeypatch):
    """Without a driver, torch cannot use a GPU either: both say to train with --cpu N."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for found in (doctor_gpu.check_driver([]), doctor_gpu.check_cuda(TORCH, [])):
        assert (found.status, "--cpu N" in found.advice) == ("warn", True)
    assert doctor_gpu.check_nccl(TORCH).status == "ok"


def test_a_driver_that_answers_is_shown_with_its_gpus(tmp_path, monkeypatch):
    """Version and GPU names, as nvidia-smi tells them."""
    nvidia_smi(tmp_path, monkeypatch, "580.65.06")
    assert doctor_gpu.check_driver([H200]) == Finding("driver", "ok", "580.65.06, 1 GPU(s): NVIDIA H200")


def test_a_driver_that_does_not_work_is_a_fail_in_its_own_words(tmp_path, monkeypatch):
    """After an upgrade without a restart, nvidia-smi fails: that is no machine without GPU."""
    nvidia_smi(tmp_path, monkeypatch, "Failed to initialize NVML: Driver/library version mismatch", 18)
    found = doctor_gpu.check_driver([])
    assert (found.status, "version mismatch" in found.says) == ("fail", True)
    assert "restart" in found.advice


def test_gpus_that_torch_can_use_are_shown_with_memory_and_capability():
    """Name, memory and compute capability of each."""
    assert doctor_gpu.check_cuda(SEEN, [H200]) == Finding("cuda", "ok", "NVIDIA H200 (150 GiB, sm_90)")


@pytest.mark.parametrize(
    ("torch", "visible", "status", "advice"),
    [
        ({**TORCH, "built_for": None}, None, "fail", "install torch with CUDA"),
        ({**TORCH, "no_cuda": "The NVIDIA driver on your system is too old"}, None, "fail", "update the NVIDIA driver"),
        (TORCH, "", "warn", "unset CUDA_VISIBLE_DEVICES"),
        ({"problem": "it hangs"}, None, "fail", "update the NVIDIA driver"),
        ({**SEEN, "kernels": ["sm_80", "sm_100"]}, None, "fail", "a build of torch for these GPUs"),
    ],
)
def test_gpus_that_torch_cannot_use_are_told_with_the_way_out(torch, visible, status, advice, monkeypatch):
    """Where the driver shows a GPU and torch cannot train on it, the finding says which of the two to change."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = doctor_gpu.check_cuda(torch, [H200])
    assert (found.status, advice in found.advice) == (status, True)


@pytest.mark.parametrize(
    ("kernels", "capability", "runs"),
    [
        (["sm_80", "sm_90"], (8, 6), True),
        (["sm_90"], (8, 6), False),
        (["sm_86"], (8, 0), False),
        (["sm_80"], (9, 0), False),
        (["compute_80"], (9, 0), True),
        (["sm_120"], (12, 0), True),
        (["sm_90a"], (9, 0), True),
        (["gfx90a"], (9, 0), True),
    ],
)
def test_kernels_run_on_gpus_of_their_major_version_that_are_not_older(kernels, capability, runs):
    """CUDA's rule: binaries within a major version upwards, PTX on everything newer."""
    assert doctor_gpu._has_kernels(kernels, *capability) is runs


def test_gpus_without_nccl_are_a_fail():
    """A torch that sees GPUs and has no NCCL cannot run gangs."""
    assert doctor_gpu.check_nccl({key: SEEN[key] for key in SEEN if key != "nccl"}).status == "fail"


def test_packages_that_do_not_fit_each_other_are_named_with_the_command_that_mends_it(monkeypatch):
    """A version outside of what another package requires is a fail, with the pip command for it."""
    versions = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "4.9.0" if name == "optuna" else versions(name))
    found = doctor.check_packages()
    assert found.status == "fail"
    assert "there is 4.9.0" in found.says
    assert re.search(r"pip install .*'optuna(<6,>=5|>=5,<6)'", found.advice)


def test_a_name_that_does_not_resolve_comes_with_the_line_for_etc_hosts(monkeypatch):
    """A machine that cannot find itself is warned with what to write where."""
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "node7.invalid")
    found = doctor.check_hostname()
    assert (found.status, found.advice) == ("warn", "add it to /etc/hosts: 127.0.1.1 node7.invalid")


def test_a_small_shared_memory_and_few_open_files_are_warnings(monkeypatch):
    """What containers and old limits give is told with the option that raises it."""
    small = doctor.shutil._ntuple_diskusage(64_000_000, 0, 64_000_000)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: small)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (1024, 1024))
    assert (doctor.check_shared_memory().status, doctor.check_open_files().status) == ("warn", "warn")
    assert "--shm-size" in doctor.check_shared_memory().advice
    assert "ulimit" in doctor.check_open_files().advice


def test_a_full_disk_fails(home, monkeypatch):
    """Less room than a checkpoint needs is a fail; Ray's folder is a warning."""
    full = doctor.shutil._ntuple_diskusage(10**12, 10**12 - 10**8, 10**8)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: full)
    assert (doctor.check_disk().status, doctor.check_ray_disk().status) == ("fail", "warn")


def test_a_home_that_cannot_be_made_is_told(home):
    """ORCH_HOME that is a file is a fail, with what to set."""
    home.write_text("")
    found = guarded("disk", doctor.check_disk)
    assert (found.status, "set ORCH_HOME" in found.says) == ("fail", True)


def test_a_url_of_another_database_is_a_fail():
    """A URL that is not PostgreSQL's fails with the sentence that says how it must look."""
    found = guarded("database", lambda: doctor_database.check_database("mysql://ann@db/x"))
    assert (found.status, "postgresql://" in found.says) == ("fail", True)


def test_a_database_is_shown_with_its_version_and_its_tables(database_url):
    """A database that orch has used is ok, without the password of its URL."""
    found = doctor_database.check_database(database_url)
    assert found.status == "ok"
    assert re.search(r"PostgreSQL \d+.* at postgresql://.*; Optuna's tables v3\S*, orch's \d+$", found.says)
    assert redact(database_url) in found.says


def test_a_database_without_tables_is_ok_and_stays_as_it_is(empty_database_url):
    """Looking at an empty database makes no tables in it."""
    for _ in range(2):
        found = doctor_database.check_database(empty_database_url)
        assert (found.status, "no tables yet" in found.says) == ("ok", True)


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ("INSERT INTO orch.version VALUES (9999, now())", "upgrade orch"),
        ("UPDATE public.alembic_version SET version_num = 'v2.6.0.a'", "optuna storage upgrade"),
    ],
)
def test_tables_of_another_version_are_a_fail(database_url, change, advice):
    """Tables that this orch or this Optuna does not understand are told before a command trips over them."""
    run_sql(database_url, change)
    found = doctor_database.check_database(database_url)
    assert (found.status, advice in found.advice) == ("fail", True)


def test_an_orch_schema_that_is_older_is_ok(database_url):
    """The next command migrates: nothing for the user to do."""
    run_sql(database_url, "UPDATE orch.version SET version = version - 1")
    found = doctor_database.check_database(database_url)
    assert (found.status, "the next command makes them" in found.says) == ("ok", True)
