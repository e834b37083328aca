"""Your Sparks: edit this file, then `pyinfra inventories/spark.py deploy/full.py --dry`.

Settings for all of them are in group_data/all.py. What one machine has of its own goes beside its
name, like the user to log in as.
"""

spark = [
    # The name or address of your machine, and its own data
    (
        "spark.local",
        {
            "ssh_user": "nvidia",
            # "ssh_hostname": "192.168.1.20",  # if its name does not lead there
            # "serve_port": 8900,              # any setting can be given for one machine
        },
    ),
]
