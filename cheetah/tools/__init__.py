"""What the commands do, each in a module: check, bench, tune, trace. Imports every part; no part imports it."""
