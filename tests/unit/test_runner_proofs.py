"""Boot proofs and what ``auto`` makes of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kernel_provisioner import proofs
from kernel_provisioner.engines.base import EngineFacts
from kernel_provisioner.errors import EngineUnavailable, PrepareFailed
from kernel_provisioner.paths import StateDirs


@dataclasses.dataclass
class MockEngine:
    """Stands for an engine whose files are as given; it starts nothing."""

    name: str
    digests: dict[str, str]
    isolation: str = "mock"

    def verify(self, *, deep: bool = False) -> EngineFacts:
        if not self.digests:
            raise EngineUnavailable(f"{self.name} is not installed.")
        return EngineFacts(self.name, "1", self.digests)


@pytest.fixture
def dirs(tmp_path: Path) -> StateDirs:
    return StateDirs(tmp_path, tmp_path, tmp_path / "run")


def _resolve(dirs: StateDirs, *engines: MockEngine) -> proofs.Choice:
    by_name: dict[str, Any] = {engine.name: engine for engine in engines}
    return proofs.resolve_auto(dirs, by_name.__getitem__, tuple(by_name))


def _prove(dirs: StateDirs, engine: MockEngine) -> proofs.ProofKey:
    key = proofs.proof_key(engine.verify())
    proofs.store(dirs, key, {"ready": 0.5})
    return key


def test_a_proof_that_cannot_be_stored_is_refused_with_its_remedy(dirs: StateDirs) -> None:
    dirs.proofs.parent.mkdir(parents=True, exist_ok=True)
    dirs.proofs.write_text("in the way")
    with pytest.raises(PrepareFailed, match="cannot be kept in") as refused:
        _prove(dirs, MockEngine("vm", {"a": "1"}))
    assert "space" in refused.value.remedy


def test_a_stored_proof_is_valid_for_its_key_only(dirs: StateDirs) -> None:
    key = _prove(dirs, MockEngine("vm", {"a": "1"}))
    assert proofs.is_valid(dirs, key)
    for field in dataclasses.fields(key):
        other = dataclasses.replace(key, **{field.name: "other"})
        assert not proofs.is_valid(dirs, other), field.name


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": "backintel.proof/1"}', "\xff"])
def test_a_damaged_proof_is_none(dirs: StateDirs, content: str) -> None:
    key = _prove(dirs, MockEngine("vm", {"a": "1"}))
    (dirs.proofs / "vm.json").write_text(content)
    assert not proofs.is_valid(dirs, key)


def test_auto_takes_the_strongest_proven_engine(dirs: StateDirs) -> None:
    strong, weak = MockEngine("vm", {"a": "1"}), MockEngine("ns", {"b": "2"})
    _prove(dirs, weak)
    assert _resolve(dirs, strong, weak).engine == "ns"
    _prove(dirs, strong)
    assert _resolve(dirs, strong, weak).engine == "vm"


def test_auto_does_not_trust_a_proof_of_other_files(dirs: StateDirs) -> None:
    _prove(dirs, MockEngine("vm", {"a": "1"}))
    with pytest.raises(EngineUnavailable, match="not booted since"):
        _resolve(dirs, MockEngine("vm", {"a": "changed"}))


def test_auto_without_a_proof_names_each_reason_and_the_remedy(dirs: StateDirs) -> None:
    with pytest.raises(EngineUnavailable) as caught:
        _resolve(dirs, MockEngine("vm", {}), MockEngine("ns", {"b": "2"}))
    assert "vm: vm is not installed" in str(caught.value)
    assert "ns: it was not booted" in str(caught.value)
    assert "backintel sandbox check --boot" in caught.value.remedy


def test_auto_passes_over_an_engine_that_this_host_cannot_run(dirs: StateDirs) -> None:
    strong, weak = MockEngine("vm", {}), MockEngine("ns", {"b": "2"})
    _prove(dirs, weak)
    choice = _resolve(dirs, strong, weak)
    assert (choice.engine, choice.requested) == ("ns", "auto")


def test_a_proof_is_bound_to_the_engines_device(
    dirs: StateDirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MockEngine("vm", {"a": "1"})
    monkeypatch.setattr(proofs, "_DEVICES", {"vm": Path("/dev/null")})
    key = _prove(dirs, engine)
    assert key.device == str(Path("/dev/null").stat().st_rdev)
    assert _resolve(dirs, engine).engine == "vm"
    monkeypatch.setattr(proofs, "_DEVICES", {"vm": Path("/dev/zero")})
    with pytest.raises(EngineUnavailable, match="not booted since"):
        _resolve(dirs, engine)
