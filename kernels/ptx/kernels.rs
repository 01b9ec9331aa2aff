// Made by `make ptx` from the constants that stand in the PTX.
&[
    Kernel { module: "dots3_swa", entry: "decode_16", heads: 16, chunk: 32, threads: 256, shared_bytes: 83904 },
    Kernel { module: "dsv3_2", entry: "decode_16", heads: 16, chunk: 32, threads: 384, shared_bytes: 95888 },
    Kernel { module: "dsv3_2", entry: "decode_32", heads: 32, chunk: 32, threads: 512, shared_bytes: 83948 },
    Kernel { module: "dsv4", entry: "decode_16", heads: 16, chunk: 32, threads: 384, shared_bytes: 87696 },
    Kernel { module: "dsv4", entry: "decode_32", heads: 32, chunk: 32, threads: 512, shared_bytes: 99472 },
    Kernel { module: "dsv4_1", entry: "decode_16", heads: 16, chunk: 32, threads: 384, shared_bytes: 79504 },
    Kernel { module: "dsv4_1", entry: "decode_32", heads: 32, chunk: 32, threads: 512, shared_bytes: 91280 },
    Kernel { module: "dsv4_1_inline", entry: "decode_16", heads: 16, chunk: 32, threads: 384, shared_bytes: 79504 },
    Kernel { module: "dsv4_1_inline", entry: "decode_32", heads: 32, chunk: 32, threads: 512, shared_bytes: 91280 },
    Kernel { module: "glm53_nope", entry: "decode_16", heads: 16, chunk: 32, threads: 384, shared_bytes: 79504 },
    Kernel { module: "glm53_nope", entry: "decode_32", heads: 32, chunk: 32, threads: 512, shared_bytes: 91280 },
]
