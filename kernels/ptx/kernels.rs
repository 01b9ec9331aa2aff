// Made by `make ptx` from the constants that stand in the PTX.
&[
    Kernel { module: "dots3_swa", entry: "decode_16", heads: 16, chunk: 32, threads: 256, shared_bytes: 84040 },
    Kernel { module: "dsv3_2", entry: "decode_16", heads: 16, chunk: 32, threads: 384, shared_bytes: 96024 },
    Kernel { module: "dsv3_2", entry: "decode_32", heads: 32, chunk: 32, threads: 512, shared_bytes: 84212 },
    Kernel { module: "dsv4", entry: "decode_16", heads: 16, chunk: 32, threads: 384, shared_bytes: 87832 },
    Kernel { module: "dsv4", entry: "decode_32", heads: 32, chunk: 32, threads: 512, shared_bytes: 99736 },
    Kernel { module: "dsv4_1", entry: "decode_16", heads: 16, chunk: 32, threads: 384, shared_bytes: 79640 },
    Kernel { module: "dsv4_1", entry: "decode_32", heads: 32, chunk: 32, threads: 512, shared_bytes: 91544 },
    Kernel { module: "dsv4_1_inline", entry: "decode_16", heads: 16, chunk: 32, threads: 384, shared_bytes: 79640 },
    Kernel { module: "dsv4_1_inline", entry: "decode_32", heads: 32, chunk: 32, threads: 512, shared_bytes: 91544 },
    Kernel { module: "glm53_nope", entry: "decode_16", heads: 16, chunk: 32, threads: 384, shared_bytes: 79640 },
    Kernel { module: "glm53_nope", entry: "decode_32", heads: 32, chunk: 32, threads: 512, shared_bytes: 91544 },
]
