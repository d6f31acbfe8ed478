"""Channels evened out before anything is quantized (`quantize.balance`): a model of the original's bits that quantizes better.

Sixteen inputs of a Linear share a scale, so that the largest channel decides how finely its neighbours are rounded, and the
columns of the weight that meet small channels are the large ones of its own blocks. What multiplies a channel can be moved
across a Linear:

    norm -> q, k, v      weight of the norm * s    columns / s
    norm -> gate, up     likewise
    up -> down           rows of up * s            columns of down / s
    v -> o               rows of v * s             columns of o / s, one s for all query heads that read a head of v

s = 2^round(-log2(rms of the channel) / 2), relative to the mean over the channels: half of the way to channels of one size, from
where the weights would become as uneven as the inputs were ("SmoothQuant", arXiv 2211.10438). A power of two changes exponents
alone, so the balanced model computes the original's bits, in BF16 and in FP32. That is tried on text, kind by kind; a kind that
does not keep them (a norm of 1 + weight, a norm behind the layer) stays as it is.

The balanced model is a folder of the original's form, the source of every arm but BF16. Whatever quantizes can start from it.
"""
