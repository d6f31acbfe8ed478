"""Records of several arms held against each other: recoveries, contrasts, speed, verdict."""
