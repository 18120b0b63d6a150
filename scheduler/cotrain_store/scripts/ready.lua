-- ready: return the queues of some runs. Read-only.
-- needs: queue_row
local args, rows = cjson.decode(ARGV[1]), {}

for _, run in ipairs(args.runs) do
  rows[#rows + 1] = queue_row(args.prefix, run, args.max_ops_per_run)
end
return rows
