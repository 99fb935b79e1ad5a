"""Find processes of a run that do not respond or are slow, and name what they were doing.

Each process notes its step and its current operation in memory (`activity`). A thread publishes
both to the store of the process group once a second and reads those of the others (`heartbeat`).
Nothing here waits for the device.
"""
