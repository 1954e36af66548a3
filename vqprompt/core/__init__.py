"""What everything stands on: backbones, images, statistics, files, devices and processes."""
