"""What the commands do, each in a module: check, bench, trace. Imports every part; no part imports it."""
