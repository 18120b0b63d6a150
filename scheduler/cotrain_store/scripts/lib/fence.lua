-- fence: refuse a caller whose role a newer process has. `args.fence` is the key of the role's epoch.
-- It decodes before any write, because the writes of a failed script are not undone.
local args = cjson.decode(ARGV[1])
if redis.call('GET', args.fence) ~= args.epoch then
  return 'FENCED'
end
