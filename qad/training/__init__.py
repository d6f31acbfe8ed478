"""Arms are made here: calibration, student, losses, trainer, states."""
