"""What a layout calls things and where it puts them: ModelOpt's and compressed-tensors'."""
