// Between the formats of glm53_nope, dsv4_1 and dsv4_1_inline, none of which has RoPE lanes.
#include "convert.cuh"

using Glm53Nope = Record<Glm::QUANTISED, Glm::GROUP, Glm::RULE, false>;

CONVERT_KERNEL(glm_to_dsv4_1, Glm53Nope, Dsv4_1)
CONVERT_KERNEL(glm_to_fp4, Glm53Nope, Fp4)
CONVERT_KERNEL(dsv4_1_to_glm, Dsv4_1, Glm53Nope)
CONVERT_KERNEL(dsv4_1_to_fp4, Dsv4_1, Fp4)
CONVERT_KERNEL(fp4_to_glm, Fp4, Glm53Nope)
CONVERT_KERNEL(fp4_to_dsv4_1, Fp4, Dsv4_1)
