from __future__ import annotations

import pytest

from kernel_provisioner.errors import ConfigError
from kernel_provisioner.routing import check_argv, check_encryption

END = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]


@pytest.mark.parametrize(
    "argv",
    [
        ["python", *END],
        ["python3", *END],
        ["/opt/somewhere/bin/python3.12", *END],
        ["python3", "-Xfrozen_modules=off", *END],
        ["python3", "-m", "ipykernel", "-f", "{connection_file}"],
        ["python3", "-m", "ipykernel_launcher", "--f={connection_file}"],
    ],
    ids=" ".join,
)
def test_what_ipykernel_installs_is_accepted(argv: list[str]) -> None:
    check_argv("Python 3", argv)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "''"),
        (["R", "--slave", "-e", "IRkernel::main()"], "'R'"),
        (["/usr/bin/pythonic", *END], "'pythonic -m ipykernel_launcher'"),
        (["non_existent_path"], "'non_existent_path'"),
        (["python3", "-m", "bash_kernel", "-f", "{connection_file}"], "'python3 -m bash_kernel'"),
        (["python3", "-c", "import ipykernel_launcher"], "'python3'"),
        (["python3", "-m"], "'python3'"),
        (["bash", "-c", "python3 -m ipykernel_launcher"], "'bash'"),
    ],
)
def test_another_program_is_refused_by_name(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_argv("Other", argv)
    assert f"the kernel 'Other' starts {named};" in str(caught.value)
    assert caught.value.remedy and caught.value.permanent


@pytest.mark.parametrize(
    "more", [["--IPKernelApp.exec_lines=import secret"], ["--profile", "hunter2"], ["--debug"]]
)
def test_more_arguments_are_refused_and_not_shown(more: list[str]) -> None:
    for argv in (["python3", *END, *more], ["python3", "-m", "ipykernel", *more, *END[2:]]):
        with pytest.raises(ConfigError, match=f"'Mine' gives ipykernel {len(more)} more") as caught:
            check_argv("Mine", argv)
        assert more[-1] not in str(caught.value)


def test_encryption_that_is_required_is_refused() -> None:
    for policy in ("", "disabled", "auto", "AUTO"):
        check_encryption(policy)
    for policy in ("required", "Required"):
        with pytest.raises(ConfigError, match="transport_encryption"):
            check_encryption(policy)
