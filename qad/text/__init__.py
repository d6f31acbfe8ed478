"""Text: sources, documents, chat templates, packing, the teacher's generations."""
