"""The types that others read: records of raw values, comparison, verdict. No heavy package."""
