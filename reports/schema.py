"""`python -m reports.schema` writes reports/schema.json, the JSON Schema of report.json, from its data classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from reports.contents import SCHEMA_VERSION, Contents

PATH = Path(__file__).parent / "schema.json"


def schema() -> dict[str, object]:
    """JSON Schema, draft 2020-12. Objects hold the named fields and no others; any number may be null."""
    made = _strict(TypeAdapter(Contents).json_schema(mode="serialization"))
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:nvfp4-qad:report:{SCHEMA_VERSION}",
        "title": "report.json of nvfp4-qad",
    }
    made["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    return {**made, **head}


def text() -> str:
    return json.dumps(schema(), indent=1, sort_keys=True) + "\n"


def _strict(value: object) -> Any:
    """Closed objects that hold all their fields; null where a number is not finite (see `contents.finite`)."""
    if isinstance(value, list):
        return [_strict(item) for item in value]
    if not isinstance(value, dict):
        return value
    # Descriptions of fields are dictionaries, so a field may be named title; pydantic's titles are text.
    value = {n: _strict(item) for n, item in value.items() if n != "default" and not (n == "title" and isinstance(item, str))}
    if value.get("type") == "number":
        value["type"] = ["number", "null"]
    if value.get("type") == "object" and isinstance(value.get("properties"), dict):
        value["additionalProperties"] = False
        value["required"] = sorted(value["properties"])
    return value


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
