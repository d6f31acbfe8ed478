"""Multiple-choice tasks shipped with the tool: lm-eval YAML files and their questions as JSONL (made by tests/tasks)."""
