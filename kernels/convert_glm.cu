// Between the formats of dsv3_2 and glm_nsa. What is read from a record of dsv3_2 is what is read from one of glm_nsa.
#include "convert.cuh"

CONVERT_KERNEL(glm_to_dsv3_2, Glm, Dsv3_2)
CONVERT_KERNEL(glm_to_glm_nvfp4, Glm, GlmNvfp4)
CONVERT_KERNEL(glm_nvfp4_to_dsv3_2, GlmNvfp4, Dsv3_2)
CONVERT_KERNEL(glm_nvfp4_to_glm, GlmNvfp4, Glm)
