"""What may be typed: the commands, their options, the types of these, and completion."""
