"""Settings for every machine. The README lists all there are, with defaults and ranges.

What is left out has its default; a host's own data (inventories/spark.py) and `--data` on the
command line go before what stands here.
"""

# Log in as a user who may use sudo; nothing of ours runs as that user afterwards
_sudo = True

# Which engine, which tested set of serving values, which model. Without the last two, those that
# go with the route.
route = "nightly"
# preset = "64k"
# pack = "mixedk"

# A download you have already: it is read, and never written
# pack_dir = "/data/models/DSV4-Flash-Vision-ablit-EXL3-MixedK"

# The server listens on the machine itself. For any other address it needs a key, TLS (or the
# acceptance of plain HTTP) and the networks that may reach it.
serve_port = 8899
# serve_host = "0.0.0.0"
# serve_api_key = True
# serve_plain_http = True
# serve_allowed_subnets = ["192.168.1.0/24"]

# Single values of the preset can be overridden; what is known to fail is refused with its reason
# serve_max_model_len = 65536
# serve_gpu_memory_utilization = 0.88
