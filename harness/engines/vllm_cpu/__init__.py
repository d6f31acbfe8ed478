"""A plugin with which the real vLLM loads and serves NVFP4 checkpoints on a CPU. The values are NVFP4's, the speed is not.

vLLM has no NVFP4 kernel for CPUs and refuses such a checkpoint. `plugin.register`, an entry point of the group
`vllm.general_plugins`, gives it what it lacks, through vLLM's own places for kernels where there are some:

    linear.py    the dense kernel, W4A4 and W4A16, of ModelOpt's and of compressed-tensors' layout
    experts.py   the experts of a mixture, likewise
    emulated.py  what the log says of it
    plugin.py    when it applies, and what it registers

Weights are decoded once, when they are loaded; activations go through `qad.numerics.nvfp4`, whose bits are those of vLLM's own
reference (tests/exact). Nothing here is imported off vLLM; on a GPU nothing is changed.
"""
