"""A dashboard as Grafana 10.1 and later read it: JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docs.deploy.observability.panels import Dashboard, Panel

_Json = dict[str, Any]
# A variable, and where its values come from.
_VARIABLES = {
    "job": 'label_values(convoy_build_info, job)',
    "instance": 'label_values(convoy_build_info{job=~"$job"}, instance)',
    "model": 'label_values(convoy_queue_depth{job=~"$job", instance=~"$instance"}, model)',
    "version": 'label_values(convoy_queue_depth{job=~"$job", instance=~"$instance", model=~"$model"}, version)',
    "device": 'label_values(convoy_device_compute_seconds_total{job=~"$job", instance=~"$instance"}, device)',
}  # fmt: skip
_SOURCE = {"type": "prometheus", "uid": "$datasource"}


def grafana(dashboard: Dashboard) -> _Json:
    """In Grafana's words."""
    return {
        "uid": f"convoy-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["convoy"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "schemaVersion": 38,
        "links": [
            {
                "title": "Convoy",
                "type": "dashboards",
                "icon": "external link",
                "tooltip": "",
                "tags": ["convoy"],
                "asDropdown": True,
                "targetBlank": False,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "annotations": {"list": []},
        "templating": {"list": [_data_source(), *map(_variable, dashboard.variables)]},
        "panels": list(_placed(dashboard.panels)),
    }


def _data_source() -> _Json:
    return {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus", "hide": 0}


def _variable(name: str) -> _Json:
    return {
        "type": "query",
        "name": name,
        "label": name.capitalize(),
        "datasource": _SOURCE,
        "query": {"query": _VARIABLES[name], "refId": "values"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "hide": 0,
    }


def _placed(panels: tuple[Panel, ...]) -> Iterator[_Json]:
    """From the left to the right, and then the next row."""
    x = y = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.wide > 24:
            x, y = 0, y + panels[number - 2].high
        yield {
            "id": number,
            "type": panel.kind,
            "title": panel.title,
            "description": panel.description,
            "datasource": _SOURCE,
            "gridPos": {"x": x, "y": y, "w": panel.wide, "h": panel.high},
            "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
            "options": _options(panel.kind),
            "targets": [_target(at, panel.kind, *query) for at, query in enumerate(panel.queries)],
            **_transformed(panel.kind),
        }
        x += panel.wide


def _target(at: int, kind: str, expr: str, legend: str) -> _Json:
    is_table = kind == "table"
    return {
        "refId": chr(ord("A") + at),
        "datasource": _SOURCE,
        "expr": expr,
        "legendFormat": legend,
        "range": not is_table,
        "instant": is_table,
        "format": "table" if is_table else "time_series",
        "editorMode": "code",
    }


def _defaults(panel: Panel) -> _Json:
    low, high = "green", "red"
    steps: list[_Json] = [{"color": low}]
    if panel.red_from is not None:
        steps = [{"color": low}, {"color": high, "value": panel.red_from}]
    elif panel.red_below is not None:
        steps = [{"color": high}, {"color": low, "value": panel.red_below}]
    found: _Json = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.kind == "timeseries":
        found |= {"min": 0} | ({} if panel.most is None else {"max": panel.most})
        found["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 25 if panel.is_stacked else 0,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "off" if panel.red_from is None else "dashed"},
        }
    return found


def _options(kind: str) -> _Json:
    if kind == "stat":
        reduced = {"values": False, "calcs": ["lastNotNull"], "fields": ""}
        return {"reduceOptions": reduced, "colorMode": "value", "graphMode": "area", "textMode": "auto"}
    if kind == "table":
        return {"showHeader": True}
    legend = {"showLegend": True, "displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"]}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _transformed(kind: str) -> _Json:
    if kind != "table":
        return {}
    hidden = dict.fromkeys(("Time", "Value", "__name__", "job"), True)
    return {"transformations": [{"id": "organize", "options": {"excludeByName": hidden}}]}
