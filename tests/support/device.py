"""Where the models of the tests are computed: on CUDA with CHAIRLIFT_TEST_DEVICE=cuda."""

import os

DEVICE = os.environ.get("CHAIRLIFT_TEST_DEVICE", "cpu")
