"""The rules of `qad check`: E are errors, W warnings. Each rule is a function Folder -> findings."""
