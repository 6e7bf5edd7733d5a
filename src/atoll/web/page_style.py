"""The style sheet of the pages."""

from __future__ import annotations

CSS = """
.nicegui-content { padding: 0 16px 16px; gap: 8px; }
.nicegui-content > * { max-width: 100%; } .nicegui-content .full { width: 100%; }
.q-table th { font-weight: 600; }
.q-table td { white-space: normal; max-width: 36em; overflow-wrap: break-word; }
.q-table td.text { overflow-wrap: anywhere; } .q-table td.text:not(:empty) { min-width: 14em; }
.q-btn { white-space: nowrap; }
.bar { height: 4px; margin-top: 2px; background: #8883; } .bar i { display: block; height: 4px; background: #0072b2; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; }
.tile { flex: 1 1 220px; max-width: 420px; border: 1px solid #8884; border-radius: 4px; padding: 6px 10px; }
.tile b { font-size: 1.2rem; } .tile small { opacity: 0.8; }
.sparkline { display: block; width: 100%; height: 40px; }
.sparkline .grid { stroke: #8886; } .sparkline .area { fill: #0072b2; }
.scroll { overflow-x: auto; }
@media (max-width: 600px) {
  .nicegui-content { padding: 0 8px 8px; }
  .head { gap: 6px 16px; } .head > :first-child { flex-basis: 100%; }
  .time-line { min-width: 900px; }
  .q-table td { white-space: nowrap; } .q-table td.text { white-space: normal; }
  .q-table :is(th, td):is(:first-child, .act) { position: sticky; left: 0; right: 0; z-index: 1; background: #fff; }
  .body--dark .q-table :is(th, td):is(:first-child, .act) { background: #1d1d1d; }
}
.head { width: 100%; display: flex; gap: 20px; align-items: baseline; padding: 8px 0; flex-wrap: wrap; }
.head a { color: inherit; text-decoration: none; } .head a.here { border-bottom: 2px solid currentColor; }
.line { opacity: 0.8; } .problem { color: #b00020; font-weight: 600; }
h2.title { font-size: 1.1rem; font-weight: 600; margin: 12px 0 0; line-height: 1.6; }
.time-line { font: 11px sans-serif; max-width: 1400px; display: block; }
.time-line text { fill: currentColor; } .time-line .grid { stroke: #8884; fill: none; }
.legend { margin-right: 16px; white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 5px; }
"""
