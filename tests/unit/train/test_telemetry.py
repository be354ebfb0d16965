from types import SimpleNamespace

from gracetune.memory.sensors import SensorReading
from gracetune.train.telemetry import Telemetry


def test_disk_space_is_that_of_the_rank_that_writes():
    readings = [
        SensorReading((), {"memory_available": 9, "memory_total": 10, "output_free": 5}),
        SensorReading((), {"memory_available": 1, "memory_total": 10, "output_free": 700}),
        SensorReading((), {"memory_available": 5, "memory_total": 10, "cache_free": 3}),
    ]
    ranks = SimpleNamespace(gather=lambda _: readings)
    telemetry = SimpleNamespace(_ranks=ranks, _sensors=SimpleNamespace(read=lambda: None))
    host = Telemetry._read_sensors(telemetry, 7).host
    assert host == {"memory_available": 1, "memory_total": 10, "output_free": 5, "cache_free": 3}
