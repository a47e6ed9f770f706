"""The receipt is true, complete, matches its published schema and holds no secret (spec K)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import jsonschema
import pytest
from sandboxes import sandbox

from kernel_provisioner.engines.bwrap import BwrapEngine
from kernel_provisioner.images.receipt import load_image
from kernel_provisioner.paths import state_dirs

pytestmark = [pytest.mark.sandbox, pytest.mark.filterwarnings("default")]


def test_receipt_of_a_session_with_source_and_artifact(repository: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text("a\n1\n")
    data.chmod(0o644)

    async def body() -> dict[str, object]:
        async with sandbox(profile="analysis", sources={"data": str(data)}) as box:
            result = await box.run(
                "text = open('/sources/data').read()\n"
                "ballast = bytearray(200 << 20)\n"
                "open('/artifacts/out.csv', 'w').write(text)"
            )
            assert result.reply["content"]["status"] == "ok"
            key = box.manager.session.key.decode()
            exported = await box.provisioner.export(tmp_path / "out")
            provisioner = box.provisioner
        receipt = provisioner.receipt
        assert receipt is not None
        assert key not in json.dumps(receipt)
        assert receipt["artifacts"] == exported
        return receipt

    receipt = asyncio.run(body())
    schema = json.loads((repository / "docs/receipt.schema.json").read_text())
    jsonschema.validate(receipt, schema)
    assert receipt["backend"] == "bwrap"
    assert receipt["image"]["id"] == load_image(state_dirs()).id  # type: ignore[index]
    assert receipt["engine"]["digests"] == dict(BwrapEngine().verify().digests)  # type: ignore[index]
    assert receipt["limits"]["memory_bytes"] == 2 << 30  # type: ignore[index]
    assert receipt["attested"]["uid"] == [10001] * 4  # type: ignore[index]
    assert 200 << 20 < receipt["peak_memory_bytes"] < 2 << 30  # type: ignore[operator]
    assert receipt["sources"] == [{"name": "data", "kind": "file", "path": str(data)}]
    assert receipt["leftovers"] == []
    timings = list(receipt["timings_ms"].values())  # type: ignore[attr-defined]
    assert timings == sorted(timings)
    assert (tmp_path / "out/out.csv").read_text() == "a\n1\n"
