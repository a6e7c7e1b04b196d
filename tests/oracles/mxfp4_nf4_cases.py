"""More MXFP4 and NF4 ground truth, CPU: edge cases beside mxfp4_oracle.npz and nf4_oracle.npz.

Run where compressed-tensors 0.20.0, bitsandbytes 0.50.2 and torch 2.13.0 are installed:
    python mxfp4_nf4_cases.py -> mxfp4_nf4_cases.npz

<case>.{f32,bf16}.w holds the input; mxfp4.<case>.<dtype>.{packed,scale} are compressed-tensors' bytes, and
nf4.<case>.<dtype>.{packed,absmax} and nf4_double_quant.<case>.<dtype>.{absmax,nested,offset} those of bitsandbytes.
"""

import bitsandbytes.functional as bnb
import numpy as np
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams

SCHEME = preset_name_to_scheme("MXFP4A16", ["Linear"])


def cases():
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(24, 96, generator=generator)
    yield "wide", normal * 10.0 ** torch.randint(-20, 20, (24, 1), generator=generator)
    outlier = 0.05 * normal
    outlier[3, 7], outlier[5] = 9.0, 0.0
    yield "outlier", outlier
    yield "zeros", torch.zeros(4, 64)
    yield "equal", torch.full((4, 64), -0.3)
    grid = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, -0.0])
    yield "mxfp4_ties", torch.cat([grid, -grid]).repeat(4, 2)
    levels = bnb.get_4bit_type("nf4", device="cpu")
    middles = ((levels[1:] + levels[:-1]) / 2).repeat(4)[:56]
    ulps = torch.arange(56, dtype=torch.int32) % 5 - 2
    near = torch.cat([torch.tensor([1.0, -1.0, 0.0, -0.0]), middles, torch.tensor([0.5, -0.5, 1e-7, -1e-7])])
    near = torch.stack([near, near])
    near[1, 4:60] = (near[1, 4:60].view(torch.int32) + ulps).view(torch.float32)
    yield "nf4_ties", near * torch.tensor([[1.0], [0.7]])
    mantissas = torch.tensor([1.0, 1.5, 1.7499999, 1.75, 1.7500001, 1.99, 1.3, 1.25])
    yield "carries", (mantissas[:, None] * torch.linspace(-1, 1, 32)).repeat(1, 2)
    yield "large", 0.02 * torch.randn(256, 320, generator=generator)


def main(path="mxfp4_nf4_cases.npz"):
    out = {}
    for name, w32 in cases():
        for tag, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            w = w32.to(dtype)
            out[f"{name}.{tag}.w"] = w.float().numpy()
            blocks = w.unflatten(-1, (-1, 32))
            scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), SCHEME.weights)
            packed = MXFP4PackedCompressor.compress({"weight": w.clone(), "weight_scale": scale}, SCHEME)
            out[f"mxfp4.{name}.{tag}.packed"] = packed["weight_packed"].numpy()
            out[f"mxfp4.{name}.{tag}.scale"] = packed["weight_scale"].numpy()
            codes, state = bnb.quantize_4bit(w, blocksize=64, quant_type="nf4")
            out[f"nf4.{name}.{tag}.packed"], out[f"nf4.{name}.{tag}.absmax"] = codes.numpy(), state.absmax.numpy()
            _, state = bnb.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=True)
            key = f"nf4_double_quant.{name}.{tag}"
            out |= {f"{key}.absmax": state.absmax.numpy(), f"{key}.nested": state.state2.absmax.numpy()}
            out[f"{key}.offset"] = state.offset.numpy()
    np.savez_compressed(path, **out)


if __name__ == "__main__":
    main()
