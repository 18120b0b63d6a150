-- tenant_limits: set some of a tenant's limits (`numbers`, as text to be exact) and reset others (`back`) to their
-- defaults. Idempotent.
local args = cjson.decode(ARGV[1])
local limits = 'cotrain:tenant:' .. args.tenant .. ':limits'

for quota, number in pairs(args.numbers) do
  redis.call('HSET', limits, quota, number)
end
for _, quota in ipairs(args.back) do
  redis.call('HDEL', limits, quota)
end
return 'OK'
