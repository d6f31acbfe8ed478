"""What was asked: recipes, those shipped with the tool as YAML, and the job that one resolves into."""
