-- sample_resolve: store the results of sample requests. The first result of each is kept. Idempotent.
-- Fenced by the worker's epoch.
-- needs: fence, counts, unread, sample_finish, swept
-- The results follow `args`, in the order of `args.requests`.
local RESULTS = 1

for i in ipairs(args.requests) do
  if is_result_swept(ARGV[RESULTS + i]) then
    return 'SWEPT'
  end
end
local resolved = {}
for i, ended in ipairs(args.requests) do
  local request, ttl_ms = ended.request, ended.ttl_ms
  local tenant = finish(args.lives, request, ARGV[RESULTS + i], ttl_ms, ended.failed, ended.result_bytes)
  if tenant then
    resolved[#resolved + 1] = request
    record_unread(tenant, request, ended.result_bytes, ttl_ms)
    add_minute(args.minute, ended.counts, args.minute_ttl_s)
    if ended.failed == 1 then
      add_failure(args.minute, tenant, request, ARGV[RESULTS + i], args.minute_ttl_s)
    end
    if ended.counts.sample_s then
      add_minute(args.minute, { ['device_s|' .. tenant] = ended.counts.sample_s }, args.minute_ttl_s)
    end
    for field, amount in pairs(ended.used) do
      add_usage('cotrain:usage:' .. tenant .. ':' .. args.hour, field, amount, args.usage_ttl_s)
    end
  end
end
if #resolved > 0 then -- a repeat is not counted
  add_counters(args.prefix, args.counted)
  redis.call('PUBLISH', 'cotrain:notify:results', table.concat(resolved, '\n'))
end
return 'OK'
